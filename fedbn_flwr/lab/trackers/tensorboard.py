"""The numbers of ``metrics.jsonl`` as event files for TensorBoard; needs the extra ``tensorboard``.

A resumed run writes its event file anew, from ``metrics.jsonl``: a process that was killed leaves rounds out that it
had not written yet, and leaves others that are repeated.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedbn_flwr.lab.trackers.interface import Tracker

__all__ = ["TensorBoard"]


class TensorBoard(Tracker):
    """Writes an event file that ``tensorboard --logdir`` can read during the run."""

    key = module = "tensorboard"

    def open(self) -> int:
        """Open a new event file in place of those of the run so far; return 0."""
        from torch.utils.tensorboard import SummaryWriter

        folder = self.folder / "tensorboard"
        for earlier in folder.glob("events.out.tfevents.*"):
            earlier.unlink()
        self._writer = SummaryWriter(str(folder), purge_step=0)  # a TensorBoard that is open drops what it has read
        return 0

    def add_round(self, server_round: int, numbers: Mapping[str, float]) -> None:
        """Write and flush the numbers."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, server_round)
        self._writer.flush()

    def close(self, summary: Mapping[str, float | str] | None) -> None:
        """Close the file."""
        self._writer.close()
