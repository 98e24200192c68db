"""The numbers of each round as an event file of TensorBoard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedbn_flwr.lab.files import numbers_of


class TensorBoardLog:
    """Writes the numbers of each round to a file for ``tensorboard --logdir``.

    Args:
        folder: the run's folder; the event file is in its folder ``tensorboard``.
        lines: the lines of the rounds that a resumed run already has. The event file is
            written again, because the file of a killed process may lack some of these
            rounds, and may have rounds that the resumed run repeats.
    """

    def __init__(self, folder: Path, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        # Import here, because TensorBoard is installed only with an extra, and runs
        # without the key tensorboard do not need it.
        from torch.utils.tensorboard import SummaryWriter

        place = folder / "tensorboard"
        for earlier in place.glob("events.out.tfevents.*"):
            earlier.unlink()
        # purge_step makes an open TensorBoard drop the events that it has read before.
        self._writer = SummaryWriter(str(place), purge_step=0)
        for line in lines:
            self.add_round(line)

    def add_round(self, line: Mapping[str, Any]) -> None:
        """Write the numbers of a line of ``metrics.jsonl``."""
        for name, value in numbers_of(line).items():
            self._writer.add_scalar(name, value, line["round"])
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
