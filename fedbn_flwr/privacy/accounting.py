"""The privacy loss of a run, as epsilon at a given delta, by ``dp-accounting``.

One release is ``f(clients) + N(0, (z C / m)^2)``: the sum of updates with norm at most
C, divided by the number m of asked clients, with Gaussian noise. Two federations are
neighbours if one client sends nothing in one of them. Such a client changes the sum by
at most C, so the noise multiplier is z. The participants are public, because clients
are drawn with the run's seed. Therefore every release counts in full, as if each client
took part in it.

Several Gaussian noises compose to one with ``1 / z^2 = sum 1 / z_t^2``. The epsilon of
this noise is exact (Balle and Wang 2018).
"""

from __future__ import annotations

import itertools
import json
import math
import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.errors import ConfigError, install_extra

_KEY = "noise-multiplier"  # key of a line in the file


@dataclass
class PrivacyAccountant:
    """The releases of a run and their cost.

    Attributes:
        delta: the probability delta of the guarantee.
        file: file that lists each release before its result exists. If a run is
            killed and repeats rounds, the repeated releases therefore count as well.
            None means that releases are only in memory.
        releases: the noise multiplier z of each release so far.
    """

    delta: float
    file: Path | None = None
    releases: list[float] = field(default_factory=list)

    def add(self, noise_multiplier: float) -> None:
        """Note a release."""
        if self.file:
            with self.file.open("a", encoding="utf-8") as lines:
                lines.write(_line(noise_multiplier))
                # Write the line to the disk before the result exists, so that it
                # survives a crash of the machine.
                lines.flush()
                os.fsync(lines.fileno())
        self.releases.append(noise_multiplier)

    def restore(self, releases: Sequence[float]) -> None:
        """Restore the releases of a run.

        Each release in memory, in the argument and in the file happened. Two lists have
        their common beginning once, and then the other releases of both. The result is
        also written to the file.
        """
        for further in (releases, self._in_file()):
            same = map(operator.eq, self.releases, further)
            common = len([*itertools.takewhile(bool, same)])
            self.releases = [*self.releases, *further[common:]]
        # This also removes a line that a killed process did not finish.
        if self.file and (self.releases or self.file.exists()):
            write_atomically(self.file, "".join(map(_line, self.releases)))

    def _in_file(self) -> list[float]:
        """Return the releases in the file.

        A line that a killed process did not finish is left out: no result followed it.
        """
        if not self.file or not self.file.exists():
            return []
        text = self.file.read_text(encoding="utf-8")
        complete = text[: text.rfind("\n") + 1]
        return [json.loads(line)[_KEY] for line in complete.splitlines()]

    def epsilon(self) -> float:
        """Return epsilon of the releases, or infinity without noise."""
        gaussian: Any = require_dp_accounting().get_epsilon_gaussian
        if not self.releases:
            return 0.0
        if 0 in self.releases:
            return math.inf
        # 1 / z^2 of the single noise that is equivalent to these releases
        precision = math.fsum((1 / noise) ** 2 for noise in self.releases)
        return float(gaussian(1 / math.sqrt(precision), self.delta))


def _line(noise_multiplier: float) -> str:
    return json.dumps({_KEY: noise_multiplier}) + "\n"


def require_dp_accounting() -> Any:
    """Return the library ``dp_accounting``.

    Raises:
        ConfigError: the library is not installed.
    """
    try:
        import dp_accounting
    except ImportError as error:
        raise ConfigError(
            "epsilon is computed by dp-accounting, but it is not installed:"
            f" {install_extra('privacy')}"
        ) from error
    return dp_accounting
