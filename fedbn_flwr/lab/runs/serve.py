"""The server's side of a run, the same in every engine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from torch import nn

from fedbn_flwr.batchnorm.parts import fixed_entries, tied_entries
from fedbn_flwr.errors import ConfigError, DataError, DivergedError, NothingTrainedError
from fedbn_flwr.lab.config import CENTRALIZED, Config, data_of, method_of
from fedbn_flwr.lab.early_stopping import EarlyStopping
from fedbn_flwr.lab.files import read_metrics
from fedbn_flwr.lab.output.checkpoint import Checkpoints, StartingPoint, starting_point
from fedbn_flwr.lab.output.checkpoint_manager import CheckpointManager
from fedbn_flwr.lab.output.folder import DIVERGED_AT, PRIVACY, RunFolder, lock_folder
from fedbn_flwr.lab.output.global_tests import GLOBAL_TESTS
from fedbn_flwr.lab.output.recorder import OnRound, Recorder
from fedbn_flwr.lab.output.run_notes import log_feature_norm, log_initial, report_data
from fedbn_flwr.lab.output.statistics_log import StatisticsLog
from fedbn_flwr.lab.partitioned.counts import refuse_no_tests
from fedbn_flwr.lab.partitioned.partitioned_data import (
    PartitionedData,
    domain_test,
    partitioned_data,
)
from fedbn_flwr.lab.runs.node_queries import REPLY_WAIT, count_nodes
from fedbn_flwr.lab.runs.start_checks import (
    Checked,
    moved_buffers,
    refuse_too_few_clients,
)
from fedbn_flwr.lab.setup import initialise, make_strategy, on_device
from fedbn_flwr.messages.protocol import TEST_SETS, VALIDATION
from fedbn_flwr.messages.records import from_record, to_record
from fedbn_flwr.privacy.differential import ClientLevelDP
from fedbn_flwr.privacy.masked_sums import MaskedSums
from fedbn_flwr.server.runs.failures import divergence, nothing_trained
from fedbn_flwr.server.runs.protection import Protection
from fedbn_flwr.server.runs.report import RoundReport
from fedbn_flwr.strategies import Strategy
from fedbn_flwr.transport import BarrierGrid
from fedbn_flwr.transport.polling_grid import over_network, polling

__all__ = ["beginning", "divergence_of", "ends_diverged", "serve", "tests_of_clients"]

logger = logging.getLogger("flwr")


def serve(
    grid: Grid, checked: Checked, out: Path, on_round: OnRound | None = None
) -> dict[str, Any]:
    """Run the server's side of a federated run and write its folder.

    Args:
        grid: the federation.
        checked: the settings and the model; ``num_clients`` = 0 takes all nodes.
        out: the output folder.
        on_round: called with each line of ``metrics.jsonl``.

    Returns:
        The summary.

    Raises:
        ConfigError: the settings cannot run here, the federation has another size, the
            folder is in use, or all clients raise this error.
        EngineError: there are no nodes.
        NothingTrainedError: no round had enough usable replies.
        DivergedError: a loss is not finite, and ``on_divergence`` is "stop"; the folder
            is complete, up to this round.
    """
    config = checked.config
    if config.strategy == CENTRALIZED:
        raise ConfigError(
            "strategy='centralized' is a reference without clients: run it with"
            " `fedbn-flwr run --set strategy=centralized`, not with `flwr run`."
        )
    for line in checked.warnings:  # those of the method are logged when it begins
        logger.warning("%s", line)
    grid = polling(grid)
    begun_with = (
        int(RunFolder.settings(out).get("num-clients", 0)) if config.resume else 0
    )
    num_nodes = count_nodes(grid, config, begun_with)
    if config.num_clients or not over_network(grid):  # else further nodes may join
        refuse_too_few_clients(config, max(num_nodes, begun_with))
    config = config.model_copy(update={"num_clients": num_nodes})
    with lock_folder(out), ExitStack() as closing:
        return _serve(grid, config, checked.model, out, on_round, closing)


def _serve(
    grid: Grid,
    config: Config,
    model: nn.Module,
    out: Path,
    on_round: OnRound | None,
    closing: ExitStack,
) -> dict[str, Any]:
    on_nodes = data_of(config).on_nodes or (
        data_of(config).by_function and over_network(grid)
    )
    data = _server_data(config, on_nodes)
    start, initial = beginning(config, model, out)
    on_device(model, config)
    strategy = _strategy(config, out, model)
    manager = CheckpointManager(start.checkpoints, config, strategy, start.saved)
    # In process no reply can be lost: a client that takes long, or a pause of the whole
    # process, is no reason to go on.
    timeout = config.round_timeout or (
        threading.TIMEOUT_MAX if isinstance(grid, BarrierGrid) else REPLY_WAIT
    )
    folder = closing.enter_context(RunFolder(out, config, start.after))
    report_data(folder, config, data)
    recorder = Recorder(folder, config, model, data, strategy, on_round)
    # Differential privacy and masked sums leave the server an average, and no client's
    # own statistics.
    watched = config.dp == "off" and not config.masked_sums
    statistics = (
        StatisticsLog(folder, config.num_server_rounds, model, strategy)
        if watched
        else None
    )
    strategy.on_replies = statistics

    def test(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        # which has no end: the run begins, and can be continued from here
        if server_round == 0:
            manager.after_round(0)
            recorder.start_clock()
            return None
        metrics = recorder.test(server_round, arrays)
        return MetricRecord(metrics) if metrics else None

    def end_round(server_round: int, *_: object) -> None:
        if statistics:
            statistics.write()
        recorder.write(strategy.run.report)
        manager.after_round(server_round, recorder.stopping)

    strategy.on_round_end = end_round
    diverged: DivergedError | None = None
    try:
        result = strategy.start(
            grid=grid,
            initial_arrays=initial,
            num_rounds=config.num_server_rounds,
            timeout=timeout,
            evaluate_config=ConfigRecord(
                {TEST_SETS: ",".join(tests_of_clients(config, data))}
            ),
            evaluate_fn=test,
        )
        manager.after_run(recorder.stopping)
    except DivergedError as error:
        result, diverged = error.result, error
    except (KeyboardInterrupt, SystemExit):
        manager.on_signal(recorder.stopping)
        raise
    finally:
        recorder.close()
        # they refer to it, which would keep the run in memory
        strategy.on_replies = strategy.on_round_end = None
    lines = read_metrics(out / "metrics.jsonl")
    # before the run was resumed
    if not diverged and lines and ends_diverged(config, lines[-1]):
        diverged = divergence_of(
            lines[-1], " ".join(strategy.advice(lines[-1]["round"])), result
        )
    if not diverged and all(
        line.get("kept-previous") and DIVERGED_AT not in line for line in lines
    ):
        raise NothingTrainedError(
            nothing_trained(config.min_replies, strategy.reports), result
        )
    arrays = _to_best(recorder.stopping, start.checkpoints, strategy) or result.arrays
    summary = recorder.finish(from_record(arrays), strategy, manager.resumed_after)
    if diverged:
        raise diverged
    return summary


def beginning(
    config: Config, model: nn.Module, out: Path
) -> tuple[StartingPoint, ArrayRecord]:
    """Return where the run begins or continues, and the global model there; initialise
    the model of a new run.
    """
    log_feature_norm(model)
    start = starting_point(out, config, model)
    if start.saved is None:
        log_initial(initialise(model, config))
    return start, to_record(start.saved.state if start.saved else model.state_dict())


def _strategy(config: Config, out: Path, model: nn.Module) -> Strategy:
    """Return the strategy of the run, with its protection."""
    strategy = make_strategy(config, model, config.num_clients)
    if protection := _protection(config, out, model):
        strategy.protect(protection)
    # Nodes that split into another number would train on the examples of held-out
    # clients.
    strategy.num_partitions = config.num_clients if config.held_out_clients else 0
    # the recorder tests with and without averaged BN, and says which
    strategy.completes_tests = False
    if not any(name.startswith("personal-") for name in method_of(config).tests):
        strategy.fraction_evaluate = 0.0
    return strategy


def tests_of_clients(config: Config, data: PartitionedData | None) -> list[str]:
    """Return the test sets that the clients are asked for; ``data`` know the domains.

    Raises:
        ConfigError: the domains are asked for, and the server has no data with domains.
    """
    tests = [
        name.removeprefix("personal-")
        for name in method_of(config).tests
        if name.startswith("personal-")
    ]
    if "domains" in tests:
        tests.remove("domains")
        domains = data.domain_views() if data else {}
        if not domains:
            raise ConfigError(
                f"eval-on=personal-domains: dataset={config.dataset} has no domains"
                " here. Leave it out."
            )
        tests += map(domain_test, domains)
    if (
        tests
        and config.validation_share
        and method_of(config).tests[0].startswith("personal")
    ):
        tests.append(VALIDATION)
    return tests


def _protection(config: Config, out: Path, model: nn.Module) -> Protection | None:
    """Return the protection of the clients' replies; None if there is none."""
    clients = None
    if config.dp != "off":
        if tied := tied_entries(model):
            name, first = next(iter(tied.items()))
            raise ConfigError(
                f"dp={config.dp}: entries '{first}' and '{name}' are one tensor and"
                " would get two noises"
            )
        clients = ClientLevelDP(
            method_of(config).dp,
            file=out / PRIVACY,
            fixed=fixed_entries(model) - moved_buffers(model, config),
        )
    if config.masked_sums:
        return MaskedSums(method_of(config).masks, clients)
    return clients


def _to_best(
    stopping: EarlyStopping | None, checkpoints: Checkpoints, strategy: Strategy
) -> ArrayRecord | None:
    """Return the model of the best round, and bring the strategy back to it; None
    without early stopping.
    """
    saved = checkpoints.best(stopping) if stopping else None
    if saved is None:
        return None
    if volatile := saved.strategy["kept"]["volatile"]:
        logger.warning(
            "client(s) %s kept their part in memory only: they go on with that of the"
            " last round, not of round %d, the best. Set state-dir, in the run's config"
            " or in each node's.",
            ", ".join(volatile),
            saved.server_round,
        )
    return strategy.go_back(to_record(saved.state), saved.strategy, saved.server_round)


def ends_diverged(config: Config, line: Mapping[str, Any]) -> bool:
    """Return whether the run ends with an error after the round of this line of
    metrics.jsonl; {} = no round yet.
    """
    return config.on_divergence == "stop" and DIVERGED_AT in line


def divergence_of(
    line: Mapping[str, Any], advice: str, result: Result | None = None
) -> DivergedError:
    """Return the error of a run whose last round, with this line of metrics.jsonl,
    diverged.
    """
    report = RoundReport(
        line["round"],
        line["phase"],
        diverged=line["diverged"],
        diverged_at=line[DIVERGED_AT],
    )
    return DivergedError(divergence(report, advice), report.diverged_at, result)


def _server_data(config: Config, on_nodes: bool) -> PartitionedData | None:
    """Return the data of the server; None if only the nodes have the data and no test
    of the server needs it.

    A protected run whose data only the nodes have is tested by nobody: results on their
    data would be no sums.
    """
    if on_nodes and config.protected and not config.held_out_clients:
        return None
    needed = bool(config.held_out_clients) or any(
        name in GLOBAL_TESTS for name in method_of(config).tests
    )
    if on_nodes and not needed:
        return None
    try:
        data = partitioned_data(config, config.num_clients)
    except DataError:
        if needed:
            raise
        return None
    if needed:
        refuse_no_tests(data, config)
    return data
