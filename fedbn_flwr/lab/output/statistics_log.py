"""The BatchNorm statistics of a run as the server sees them: ``statistics.jsonl``, see ``statistics_lines``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from fedbn_flwr.batchnorm.averaging import State
from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.output.folder import STATISTICS_FILE, RunFolder
from fedbn_flwr.lab.output.statistics_lines import statistics_line, tracked_layers
from fedbn_flwr.messages.records import tensors
from fedbn_flwr.server.method import Reply
from fedbn_flwr.strategies import Strategy

__all__ = ["StatisticsLog"]


class StatisticsLog:
    """Writes a line in every ``watch-statistics``-th round and in the last; it is a strategy's ``on_replies``.

    The line is made when the replies are there, and written at the end of the round. Nothing of the run depends on it.
    A round below ``min-replies`` has no line.
    """

    def __init__(self, folder: RunFolder, config: Config, model: nn.Module, strategy: Strategy) -> None:
        self._folder, self._config, self._strategy = folder, config, strategy
        self._layers = tracked_layers(model)
        self._line: dict[str, Any] | None = None

    def __call__(self, server_round: int, replies: Sequence[Reply], before: State, after: State) -> None:
        """Make the line of a round, given its replies and the global state before and after it."""
        config, run = self._config, self._strategy.run
        if server_round % config.watch_statistics and server_round != config.num_server_rounds:
            return
        names = {*run.parts.select([Part.STATISTICS, Part.COUNTERS])}

        def of_bn(state: State) -> Any:
            return tensors({name: array for name, array in state.items() if name in names})

        of_replies = [(reply.node.label, of_bn(reply.state)) for reply in replies]
        figures = statistics_line(self._layers, of_bn(before), of_bn(after), of_replies)
        self._line = {"round": server_round, "phase": run.report.phase, **figures}

    def write(self) -> None:
        """Write the line of this round, if there is one."""
        if self._line:
            self._folder.append(STATISTICS_FILE, self._line)
        self._line = None
