"""What a run notes of its data and model before it trains, and of its BatchNorm statistics while it does."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import nn

from fedbn_flwr.batchnorm.averaging import State
from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.data import is_own
from fedbn_flwr.lab.models import InitReport
from fedbn_flwr.lab.output.folder import STATISTICS_FILE, RunFolder
from fedbn_flwr.lab.output.statistics_lines import statistics_line, tracked_layers
from fedbn_flwr.lab.partitioned.partitioned_data import PartitionedData
from fedbn_flwr.lab.partitioned.report import classes_without_client, data_report, sha256_of_data
from fedbn_flwr.lab.partitioned.splitting import split_to_json
from fedbn_flwr.messages.records import tensors
from fedbn_flwr.norms.feature import NormalisedLinear
from fedbn_flwr.server.method import Reply
from fedbn_flwr.strategies import Strategy

__all__ = ["StatisticsLog", "log_feature_norm", "log_initial", "report_data"]

logger = logging.getLogger("flwr")


def report_data(folder: RunFolder, config: Config, data: PartitionedData | None) -> None:
    """Write the split of the data; log and write what was read of own data."""
    if data is None:
        return
    if split := split_to_json(data):
        folder.save("split.json", split, indent=None)
    for line in classes_without_client(data, config):
        logger.warning("%s", line)
    if not is_own(config.dataset):
        return
    report = data_report(data, config)
    logger.info("%s", report.text())
    for warning in report.warnings:
        logger.warning("%s", warning)
    of_data = {"sha256": sha256_of_data(config), "notes": report.notes, "warnings": report.warnings}
    folder.save("data.json", {**report.figures, **of_data})


def log_feature_norm(model: nn.Module) -> None:
    """Log which layer gets features of a fixed length: the user knows whether it is the classifier."""
    for path, module in model.named_modules():
        if isinstance(module, NormalisedLinear):
            logger.info("feature-norm: '%s' is the classifier; the features before it get a fixed length", path)


def log_initial(report: InitReport | None) -> None:
    """Log what the initial weights hold: as a warning if some of them, or of the model's entries, found no partner."""
    if report is not None:
        logger.log(logging.INFO if report.complete else logging.WARNING, "%s", report)


class StatisticsLog:
    """Writes a line in the rounds of ``watch-statistics`` and in the last; it is a strategy's ``on_replies``.

    By default these are rounds 1, 10, 20, ..., 90, 100, 200, ...: what changes fast is seen, and where a line costs a
    twentieth of a round, as with one step of a small MLP, all lines of a run cost 1 % of it or less.

    The line is made when the replies are there, and written at the end of the round. Nothing of the run depends on it.
    A round below ``min-replies`` has no line.
    """

    def __init__(self, folder: RunFolder, config: Config, model: nn.Module, strategy: Strategy) -> None:
        self._folder, self._config, self._strategy = folder, config, strategy
        self._layers = tracked_layers(model)
        self._line: dict[str, Any] | None = None

    def is_due(self, server_round: int) -> bool:
        """Return whether the round has a line."""
        every = self._config.watch_statistics
        if every < 0:
            every = 1 if server_round == 1 else max(10, 10 ** (len(str(server_round)) - 1))
        return server_round % every == 0 or server_round == self._config.num_server_rounds

    def __call__(self, server_round: int, replies: Sequence[Reply], before: State, after: State) -> None:
        """Make the line of a round, given its replies and the global state before and after it."""
        if not self.is_due(server_round):
            return
        run = self._strategy.run
        names = {*run.parts.select([Part.STATISTICS, Part.COUNTERS])}

        def of_bn(state: State) -> Any:
            return tensors({name: array for name, array in state.items() if name in names})

        of_replies = [(reply.node.label, of_bn(reply.state)) for reply in replies]
        figures = statistics_line(self._layers, of_bn(before), of_bn(after), of_replies)
        if figures["layers"]:  # none where the model has no BatchNorm, or the method sends no statistics
            self._line = {"round": server_round, "phase": run.report.phase, **figures}

    def write(self) -> None:
        """Write the line of this round, if there is one."""
        if self._line:
            self._folder.append(STATISTICS_FILE, self._line)
        self._line = None
