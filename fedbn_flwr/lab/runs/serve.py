"""The server's side of a run, the same in every engine.

``serve`` is the run from top to bottom. The functions below are its steps, in their
order.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from torch import nn

from fedbn_flwr.batchnorm.fixed_entries import fixed_entries
from fedbn_flwr.batchnorm.parts import tied_entries
from fedbn_flwr.errors import ConfigError, DataError, DivergedError, EngineError
from fedbn_flwr.lab.config import CENTRALIZED, Config, data_of, method_of
from fedbn_flwr.lab.data import is_own
from fedbn_flwr.lab.objects_of_config import (
    client_tests,
    initialise,
    make_strategy,
    on_device,
)
from fedbn_flwr.lab.partitioned.counts import (
    data_counts,
    data_text,
    data_warnings,
    names_of,
    refuse_no_tests,
)
from fedbn_flwr.lab.partitioned.partitioned_data import (
    PartitionedData,
    domain_test,
    federation_size,
    partitioned_data,
)
from fedbn_flwr.lab.results.checkpoint import Checkpoint, Checkpoints
from fedbn_flwr.lab.results.folder import PRIVACY, RunFolder, lock_folder
from fedbn_flwr.lab.results.result_writer import OnRound, ResultWriter
from fedbn_flwr.lab.results.same_data import sha256_of_data
from fedbn_flwr.lab.results.tester import headlines
from fedbn_flwr.lab.results.tests_table import GLOBAL_TESTS, own_score
from fedbn_flwr.lab.runs.check_start import (
    CheckedConfig,
    moved_buffers,
)
from fedbn_flwr.messages.protocol import (
    SERVER_ROUND,
    TEST_SETS,
    VALIDATION,
    NodeProperties,
)
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.norms.feature import NormalisedLinear
from fedbn_flwr.privacy.differential import ClientLevelDP
from fedbn_flwr.server.runs.protection import Protection
from fedbn_flwr.transport import BarrierGrid
from fedbn_flwr.transport.polling_grid import ImmediateGrid, over_network, polling

logger = logging.getLogger("flwr")

NODE_GRACE = 15.0  # seconds to wait for the nodes of a new run
# seconds to wait for the nodes of a resumed run, because Flower refuses the key of a
# killed node for about 44 s
RETURN_GRACE = 60.0
REPLY_WAIT = 3600.0  # seconds to wait for the replies of a round over a network


def serve(
    grid: Grid, checked: CheckedConfig, out: Path, on_round: OnRound | None = None
) -> dict[str, Any]:
    """Run the server's side of a federated run, and return the summary.

    Args:
        grid: the federation.
        checked: the settings and the model; ``num_clients`` 0 takes all nodes.
        out: the output folder.
        on_round: called with each line of ``metrics.jsonl``.

    Raises:
        ConfigError: the settings cannot run here, the federation has another number of
            nodes than the config, the folder is in use, or all clients raise this error.
        EngineError: no nodes are connected.
        NothingTrainedError: no round had enough usable replies.
        DivergedError: a loss is not finite, and ``on_divergence`` is "stop". The folder
            is complete up to this round.
    """
    for line in checked.warnings:  # the strategy logs its own warnings
        logger.warning("%s", line)

    # Count the clients first, because the data are split over their number.
    grid = polling(grid)
    config = _with_clients(checked.config, grid, out)
    with lock_folder(out):
        data = _server_data(config, _only_on_nodes(config, grid))
        checkpoints = Checkpoints.of(out, config, checked.model)
        saved, after = checkpoints.beginning()
        initial = initial_model(config, checked.model, saved)
        model = on_device(checked.model, config)

        # Make the strategy before the folder is cut back to the checkpoint: if the
        # strategy cannot be restored, the folder then stays complete.
        strategy = make_strategy(config, model, federation_size(config))
        protection = _protection(config, out, model)
        if protection:
            strategy.protect(protection)
        if data:
            strategy.site_names = names_of(data)
        checkpoints.follow(strategy, saved)

        folder = RunFolder(out, config, after)
        report_data(folder, config, data)
        record = ResultWriter(
            folder, config, model, data, strategy, checkpoints, on_round
        )
        tests = ",".join(tests_of_clients(config, data))
        try:
            with record.open():
                result = strategy.start(
                    grid=grid,
                    initial_arrays=initial,
                    num_rounds=config.num_server_rounds,
                    timeout=_timeout(config, grid),
                    evaluate_config=ConfigRecord({TEST_SETS: tests}),
                    evaluate_fn=record.test,
                )
        except DivergedError as error:
            # Write the results of a diverged run before the error is raised.
            return record.finish(error.result, error)
        return record.finish(result)


def _with_clients(config: Config, grid: ImmediateGrid, out: Path) -> Config:
    """Wait for the nodes, and return the config with the number of clients."""
    begun_with = 0
    if config.resume:
        begun_with = int(RunFolder.settings(out).get("num-clients", 0))
    num_clients = count_nodes(grid, config, begun_with)
    # The one client of such a run has the data of all clients of the split.
    if config.strategy == CENTRALIZED:
        return config
    return config.model_copy(update={"num_clients": num_clients})


def count_nodes(grid: ImmediateGrid, config: Config, begun_with: int) -> int:
    """Wait for the config's number of nodes, and return the number of clients.

    Over a network, nodes connect one after another. If ``num_clients`` is 0, the number
    of clients is the number of partitions that the nodes report, but at least the number
    of nodes. A resumed run over a network may continue with fewer nodes, and with more
    nodes if ``num_clients`` is 0. In other engines, another number of nodes would change
    the split, so it is refused.

    Raises:
        EngineError: no nodes are connected.
        ConfigError: the federation has another number of nodes than the config.
    """
    wanted = federation_size(config) or begun_with
    network = over_network(grid)
    may_differ = begun_with > 0 and network

    # Wait for the nodes.
    grace = RETURN_GRACE if may_differ else NODE_GRACE
    connected = _wait_for_nodes(grid, wanted or 1, grace)
    if not connected:
        raise EngineError(
            f"no nodes connected within {grace:g} s. Start the SuperNodes first"
        )

    # Without num-clients, take all nodes that are there.
    if not wanted:
        return _all_nodes(grid, config) if network else connected

    # The data of a resumed run were split for this number of clients. It stays the
    # number of clients, even if other nodes are there now.
    if may_differ and connected < wanted == begun_with:
        logger.warning(
            "the run began with %d node(s) and continues with %d. The others may come"
            " back",
            wanted,
            connected,
        )
    elif may_differ and connected > wanted and not config.num_clients:
        logger.warning(
            "the run began with %d node(s) and continues with %d", wanted, connected
        )
    elif connected != wanted:
        start = (
            f"In simulation add --federation-config 'num-supernodes={wanted}' to `flwr"
            " run`"
        )
        if network:
            start = f"Start {wanted} SuperNodes"
        why = "or set num-clients=0 to take all nodes"
        if begun_with:
            why = f"the run began with {begun_with}"
        raise ConfigError(
            f"num-clients={wanted}, but the federation has {connected} node(s)."
            f" {start}; {why}."
        )
    return wanted


def _wait_for_nodes(grid: Grid, at_least: int, grace: float) -> int:
    """Return the number of connected nodes once there are enough.

    Args:
        grid: the federation.
        at_least: the number of nodes that is enough.
        grace: the largest number of seconds to wait for these nodes.
    """
    deadline = time.monotonic() + grace
    connected = len(list(grid.get_node_ids()))
    while connected < at_least and time.monotonic() <= deadline:
        time.sleep(0.2)
        connected = len(list(grid.get_node_ids()))
    return connected


def _all_nodes(grid: ImmediateGrid, config: Config) -> int:
    """Return the number of nodes or the number of partitions, whichever is larger.

    The config of each node with a partition has the number of partitions, so one answer
    is enough.
    """
    # Ask all nodes, and continue with the first answer.
    messages = []
    content = RecordDict({"config": ConfigRecord({SERVER_ROUND: 0})})
    for node_id in grid.get_node_ids():
        messages.append(Message(content, node_id, MessageType.QUERY))
    replies = grid.send_and_receive_until(
        messages,
        lambda replies: any(reply.has_content() for reply in replies),
        timeout=config.round_timeout or REPLY_WAIT,
    )
    parts = 0
    for reply in replies:
        if reply.has_content():
            parts = max(parts, NodeProperties.read(reply).num_partitions or 0)

    # Wait for as many nodes as there are partitions, because some may still be
    # starting.
    connected = _wait_for_nodes(grid, parts, NODE_GRACE)
    if connected < parts:
        logger.warning(
            "num-partitions=%d, but the run begins with %d node(s). The others may join"
            " later",
            parts,
            connected,
        )
    return max(connected, parts)


def _only_on_nodes(config: Config, grid: Grid) -> bool:
    """Return whether only the nodes have the data.

    Over a network, this includes data from a user's function, because each node calls
    the function for its own site.
    """
    data = data_of(config)
    return data.on_nodes or (data.by_function and over_network(grid))


def _server_data(config: Config, on_nodes: bool) -> PartitionedData | None:
    """Return the data of the server, or None if the server has none.

    It has none if only the nodes have the data and no test of the server needs them, or
    if the files are missing here. It also has none if only the nodes have the data of a
    protected run without held-out clients, because test results are not protected sums.

    Raises:
        DataError: a test of the server needs the data, but they cannot be used.
    """
    if on_nodes and config.protected and not config.held_out_clients:
        return None
    by_server = [name for name in method_of(config).tests if name in GLOBAL_TESTS]
    needed = bool(config.held_out_clients) or bool(by_server)
    if on_nodes and not needed:
        return None
    try:
        data = partitioned_data(config, config.num_clients)
    except DataError:
        if needed:
            raise
        # Continue without data, because the nodes may have the files that are missing
        # here.
        return None
    if needed:
        refuse_no_tests(data, config)
    return data


def initial_model(
    config: Config, model: nn.Module, saved: Checkpoint | None
) -> ArrayRecord:
    """Return the global model at the start of a run, from a checkpoint or as built.

    The model of a new run gets its initial weights.
    """
    # Log the layer that counts as the classifier, because only the user can judge
    # whether it is.
    for path, module in model.named_modules():
        if isinstance(module, NormalisedLinear):
            logger.info(
                "feature-norm: '%s' is the classifier; the features before it get a"
                " fixed length",
                path,
            )
    if saved:
        return to_record(saved.state)
    loaded = initialise(model, config)
    if loaded:
        # Warn if a weight of the file or an entry of the model had no counterpart.
        level = logging.INFO if loaded.complete else logging.WARNING
        logger.log(level, "%s", loaded)
    return to_record(model.state_dict())


def report_data(
    folder: RunFolder, config: Config, data: PartitionedData | None
) -> None:
    """Log the warnings about the data. Of own data, log and save the counts."""
    if data is None:
        return
    warnings = data_warnings(data, config)
    for line in warnings:
        logger.warning("%s", line)
    if not is_own(config.dataset):
        return
    # Log and save the counts of own data, because their name does not identify them,
    # and runs are compared by their data.
    logger.info("%s", data_text(data, config))
    of_data = {
        "dataset": config.dataset,
        "examples": data_counts(data),
        "sha256": sha256_of_data(config),
        # The data give the task, and a page of an unfinished run may lack the data.
        "headline": headlines(config)[0],
        **own_score(data_of(config).task.score),
    }
    folder.save("data.json", {**of_data, "warnings": warnings})


def _protection(config: Config, out: Path, model: nn.Module) -> Protection | None:
    """Return the protection of the clients' replies, or None without one."""
    clients = None
    if config.dp != "off":
        tied = tied_entries(model)
        if tied:
            name, first = next(iter(tied.items()))
            raise ConfigError(
                f"dp={config.dp}: entries '{first}' and '{name}' are one tensor, so noise"
                " would be added to this tensor twice"
            )
        clients = ClientLevelDP(
            method_of(config).dp,
            file=out / PRIVACY,
            fixed=fixed_entries(model) - moved_buffers(model, config),
        )
    return clients


def tests_of_clients(config: Config, data: PartitionedData | None) -> list[str]:
    """Return the names of the test sets that clients test on.

    Each domain of ``data`` is a test set. If clients do the first test of ``eval-on``,
    their validation examples are also a test set.

    Raises:
        ConfigError: the tests need domains, but the server has no data with domains.
    """
    tests = client_tests(config)
    if "domains" in tests:
        tests.remove("domains")
        domains = data.domain_views() if data else {}
        if not domains:
            raise ConfigError(
                f"eval-on=personal-domains: dataset={config.dataset} has no domains"
                " here. Leave it out."
            )
        tests += [domain_test(name) for name in domains]
    # If clients do the first test, they also test on the validation examples, because
    # the validation score belongs to the first test.
    headline = method_of(config).tests[0]
    if tests and config.validation_share and headline.startswith("personal"):
        tests.append(VALIDATION)
    return tests


def _timeout(config: Config, grid: Grid) -> float:
    """Return the number of seconds that a round waits for its replies."""
    if config.round_timeout:
        return config.round_timeout
    # In process, a reply cannot be lost, so wait without a limit, even for a slow
    # client or a paused process.
    if isinstance(grid, BarrierGrid):
        return threading.TIMEOUT_MAX
    return REPLY_WAIT
