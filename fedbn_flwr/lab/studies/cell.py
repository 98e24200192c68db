"""A run of a study: its place in the grid, its settings and its folder."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedbn_flwr.lab.config import Config, Scalar

__all__ = ["Cell", "trial_name"]


@dataclass(frozen=True)
class Cell:
    """One run of a study: its own settings, and those of ``base``. ``trial`` is its point of ``tune``; "" for none."""

    method: str
    split: str
    seed: int
    settings: Mapping[str, Scalar]
    base: Mapping[str, Scalar]
    trial: str = ""

    @property
    def name(self) -> str:
        """METHOD/SPLIT/seed-N; of a trial tune/METHOD/SPLIT/KEY=VALUE/seed-N."""
        pair = f"{self.method}/{self.split}"
        return f"tune/{pair}/{self.trial}/seed-{self.seed}" if self.trial else f"{pair}/seed-{self.seed}"

    @functools.cached_property
    def config(self) -> Config:
        """The run's config.

        Raises:
            ConfigError: a setting is wrong.
        """
        return Config.make_of_shared(self.base, self.settings)[0]

    @property
    def dropped(self) -> dict[str, str]:
        """The keys of ``base`` that have no effect in this run, with the reason."""
        return Config.make_of_shared(self.base, self.settings)[1]

    def folder(self, out: Path) -> Path:
        """Return the run's folder under ``out``."""
        parts = [re.sub(r"[^A-Za-z0-9._+=-]", "_", part) for part in self.name.split("/")]
        return out.joinpath(*(part if part.strip(".") else "_" * max(1, len(part)) for part in parts))  # not "..", ""


def trial_name(point: Mapping[str, Scalar]) -> str:
    """Return the name of a point of ``tune``, such as "learning-rate=0.1"."""
    return ",".join(f"{key}={value}" for key, value in point.items())
