"""The scalars of ``metrics.jsonl`` as event files for TensorBoard; needs the extra ``tensorboard``."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedbn_flwr.errors import ConfigError

__all__ = ["TensorBoardLog"]


class TensorBoardLog:
    """Writes event files that ``tensorboard --logdir`` can read during the run.

    Args:
        folder: folder of the event files.
        after: TensorBoard drops rounds after this one: the run repeats them.
    """

    def __init__(self, folder: Path, after: int) -> None:
        self.check()
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=after + 1)

    @staticmethod
    def check() -> None:
        """Raise ConfigError if TensorBoard is not installed."""
        if importlib.util.find_spec("tensorboard") is None:
            raise ConfigError(
                "tensorboard=true needs TensorBoard, which is not installed: pip install 'fedbn-flwr[tensorboard]', or "
                "leave the key out"
            )

    def add_round(self, line: Mapping[str, Any]) -> None:
        """Write and flush the numbers of one round."""
        for name, value in _scalars(line):
            self._writer.add_scalar(name, value, line["round"])
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def _scalars(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a line, those of domains as ``metric/domain``; clients and lists are left out."""
    numbers = {f"{metric}/{d}": v for metric, values in line.get("domains", {}).items() for d, v in values.items()}
    for name, value in {**line, **numbers}.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and name != "round":
            yield name, value
