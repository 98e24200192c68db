r"""The privacy loss of a run: epsilon at a given delta, by the library ``dp-accounting``.

One release is ``f(clients) + N(0, (z C / m)^2)``: the sum of updates with norm at most C, divided by the number m of
clients that were asked. The numbers n of clients with data and m of those asked are public, and so is who takes part.
Two federations are neighbours if

- ``zero-out``: one client sends nothing in one of them. The sum changes by at most C: the noise multiplier is z.
- ``replace-one``: one client has other data. The sum changes by up to 2 C, so the noise multiplier is z / 2.

With known sampling every release counts in full, as if the client took part in it. Gaussian noises compose to one with
``1 / z^2 = sum 1 / z_t^2``, whose epsilon is exact (Balle and Wang 2018).

With secret sampling (m of n without replacement, known to nobody, ``replace-one``) the bound is that of Wang, Balle and
Kasiviswanathan 2019, Theorem 27, in Renyi divergences. The library's event takes the noise as a multiple of the whole
change, which is 2 C here. It holds against those who see the models alone: a client knows whether it was drawn itself.

A step of DP-SGD (``privacy.record_level``) draws each example of a client with probability q. One record is removed,
or its gradient is zero: the sum changes by at most C, and the steps compose as privacy loss distributions (Koskela et
al. 2020; Doroshenko et al. 2022), discretised so that epsilon is never too small.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.errors import ConfigError, install_extra

__all__ = [
    "Neighbours",
    "PrivacyAccountant",
    "Release",
    "Steps",
    "epsilon_of_steps",
    "noise_for_steps",
    "note",
    "require_dp_accounting",
    "restored",
]

Neighbours = Literal["zero-out", "replace-one"]


class Release(NamedTuple):
    """One noisy sum: z, the number m of sampled clients, and the number n that they were drawn from.

    ``noise_multiplier`` is 0 for noise that can be repeated. ``secret`` says whether nobody knows who was drawn.
    """

    noise_multiplier: float
    sampled: int
    population: int
    secret: bool = False

    @property
    def amplified(self) -> bool:
        """Whether it costs less than without sampling."""
        return self.secret and self.sampled < self.population


class Steps(NamedTuple):
    """Steps of DP-SGD: z, the probability q with which an example is drawn, and the number of steps.

    ``noise_multiplier`` is 0 for noise that can be repeated.
    """

    noise_multiplier: float
    rate: float
    steps: int


R = TypeVar("R", Release, Steps)


def note(file: Path | None, release: Release | Steps) -> None:
    """Append a release to the file, if there is one, so that it is there after a crash."""
    if file:
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(release._asdict()) + "\n")
            lines.flush()
            os.fsync(lines.fileno())


def restored(file: Path | None, kind: type[R], *known: list[R]) -> list[R]:
    """Return the longest of the known lists and that in the file, which then has it, too."""
    lists = list(known)
    if file and file.exists():
        text = file.read_text(encoding="utf-8")
        complete = text[: text.rfind("\n") + 1]  # without the line that a killed process did not finish
        lists.append([kind(**json.loads(line)) for line in complete.splitlines()])
    longest: list[R] = []
    for releases in lists:
        longest = releases if len(releases) > len(longest) else longest
    if file and longest:
        write_atomically(file, "".join(json.dumps(release._asdict()) + "\n" for release in longest))
    return list(longest)


@dataclass
class PrivacyAccountant:
    """The releases of a run, and what they cost.

    Attributes:
        delta: the probability delta of the guarantee.
        neighbours: which federations the guarantee cannot tell apart.
        file: where each release is noted before its result exists, so that a run which is killed and repeats rounds
            counts them twice, as it must; None = in memory only.
        releases: the releases so far.
    """

    delta: float
    neighbours: Neighbours
    file: Path | None = None
    releases: list[Release] = field(default_factory=list)

    def add(self, release: Release) -> None:
        """Note a release."""
        note(self.file, release)
        self.releases.append(release)

    def restore(self, releases: Iterable[Release]) -> None:
        """Restore the releases of a run: those given, those in memory or those in the file, whichever are most."""
        self.releases = restored(self.file, Release, self.releases, list(releases))

    def epsilon(self, more: Iterable[Release] = ()) -> float:
        """Return epsilon of all releases and of ``more``; infinity if one has no noise."""
        releases = [*self.releases, *more]
        if any(release.noise_multiplier == 0 for release in releases):
            return math.inf
        plain = self._composed(releases)
        if self.neighbours == "zero-out" or not any(release.amplified for release in releases):
            return plain
        return min(plain, _amplified(tuple(sorted(Counter(releases).items())), self.delta))

    def noise_for(
        self, epsilon: float, sampled: int, population: int, num_releases: int, secret: bool = False
    ) -> float:
        """Return the smallest noise multiplier with which so many releases cost at most ``epsilon``, to 1e-3.

        Raises:
            ConfigError: no noise multiplier up to 10,000 is enough.
        """

        def cost(noise: float) -> float:
            return self.epsilon([Release(noise, sampled, population, secret)] * num_releases)

        return _smallest_noise(cost, epsilon, f"dp-target-epsilon={epsilon} over {num_releases} rounds")

    def _composed(self, releases: Sequence[Release]) -> float:
        gaussian: Any = require_dp_accounting().get_epsilon_gaussian
        if not releases:
            return 0.0
        change = 1 if self.neighbours == "zero-out" else 2  # of the sum, in units of C
        precision = math.fsum((change / release.noise_multiplier) ** 2 for release in releases)
        return float(gaussian(1 / math.sqrt(precision), self.delta))


@functools.lru_cache(maxsize=64)
def _amplified(counted: tuple[tuple[Release, int], ...], delta: float) -> float:
    """Return epsilon of so many releases of each kind; one whose clients are known counts as if all were drawn."""
    library = require_dp_accounting()
    accountant = library.rdp.RdpAccountant(neighboring_relation=library.NeighboringRelation.REPLACE_ONE)
    for (noise, sampled, population, secret), count in counted:
        drawn = sampled if secret else population
        event = library.SampledWithoutReplacementDpEvent(population, drawn, library.GaussianDpEvent(noise / 2))
        accountant.compose(event, count)
    return float(accountant.get_epsilon(delta))


def epsilon_of_steps(releases: Iterable[Steps], delta: float) -> float:
    """Return epsilon of all steps together, for the removal of one record; infinity if one has no noise."""
    steps: Counter[tuple[float, float]] = Counter()
    for release in releases:
        steps[release.noise_multiplier, release.rate] += release.steps
    return _of_steps(tuple(sorted(steps.items())), delta)


def noise_for_steps(epsilon: float, rate: float, steps: int, delta: float, after: Sequence[Steps] = ()) -> float:
    """Return the smallest noise multiplier with which so many steps of DP-SGD cost at most ``epsilon``, to 1e-3.

    The steps ``after`` which they are done count, too.

    Raises:
        ConfigError: no noise multiplier up to 10,000 is enough.
    """

    def cost(noise: float) -> float:
        return epsilon_of_steps([*after, Steps(noise, rate, steps)], delta)

    return _smallest_noise(cost, epsilon, f"epsilon={epsilon} over {steps} steps")


def _smallest_noise(cost: Callable[[float], float], epsilon: float, what: str) -> float:
    low, high = 0.0, 1.0
    while cost(high) > epsilon:
        low, high = high, 2 * high
        if high > 1e4:
            raise ConfigError(f"{what} needs more noise than 10000")
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if cost(middle) > epsilon else (low, middle)
    return high


@functools.lru_cache(maxsize=64)
def _of_steps(counted: tuple[tuple[tuple[float, float], int], ...], delta: float) -> float:
    if any(noise == 0 for (noise, _), _ in counted):
        return math.inf
    if not counted:
        return 0.0
    library = require_dp_accounting()
    # A loss is some 1 / z: a grid a thousand times finer changes epsilon by less than 1 %.
    grid = 1e-3 * max(1.0, *(1 / noise for (noise, _), _ in counted))
    accountant = library.pld.PLDAccountant(library.NeighboringRelation.ADD_OR_REMOVE_ONE, grid)
    for (noise, rate), count in counted:
        event = library.GaussianDpEvent(noise)
        accountant.compose(event if rate == 1 else library.PoissonSampledDpEvent(rate, event), count)
    return float(accountant.get_epsilon(delta))


def require_dp_accounting() -> Any:
    """Return the library.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import dp_accounting
    except ImportError as error:
        raise ConfigError(
            f"epsilon is computed by dp-accounting, which is not installed; {install_extra('privacy')}"
        ) from error
    return dp_accounting
