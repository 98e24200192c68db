"""The numbers of ``metrics.jsonl`` as event files for TensorBoard; needs the extra ``tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from fedbn_flwr.lab.config import Config

__all__ = ["TensorBoard"]


class TensorBoard:
    """Writes an event file that ``tensorboard --logdir`` can read during the run.

    A resumed run writes it anew, from ``metrics.jsonl``: a process that was killed leaves rounds out that it had not
    written yet, and leaves others that are repeated.
    """

    key: ClassVar[str] = "tensorboard"
    module: ClassVar[str] = "tensorboard"

    def __init__(self, config: Config, folder: Path, after: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make, self._folder = SummaryWriter, folder / "tensorboard"
        self._writer: Any = None

    @staticmethod
    def problem(config: Config) -> str:
        """Return "": it needs no service."""
        return ""

    def open(self) -> int:
        """Open a new event file in place of those of the run so far; return 0."""
        for earlier in self._folder.glob("events.out.tfevents.*"):
            earlier.unlink()
        self._writer = self._make(str(self._folder), purge_step=0)  # a TensorBoard that is open drops what it has read
        return 0

    def add_round(self, server_round: int, numbers: Mapping[str, float]) -> None:
        """Write and flush the numbers."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, server_round)
        self._writer.flush()

    def close(self, summary: Mapping[str, float | str] | None) -> None:
        """Close the file."""
        self._writer.close()
