"""The check of a node: its config, its data, a short round, its disk, its versions and its way to the server."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict

from fedbn_flwr.client.torch_client import TorchClient
from fedbn_flwr.compat.flower import as_network_node, node_config_of
from fedbn_flwr.errors import ConfigError, FedBNError, split_code
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.node_check.connection import Connection, check_connection
from fedbn_flwr.lab.node_check.page import Finding, Page, fault, ok, untried, warning
from fedbn_flwr.lab.node_check.trial import Trial, try_rounds
from fedbn_flwr.lab.runs.node import client_fn, node_report
from fedbn_flwr.lab.runs.node_guard import check_run
from fedbn_flwr.machine import memory_bytes
from fedbn_flwr.messages.protocol import STATE_DIR
from fedbn_flwr.messages.versions import as_text, differences, own_versions

__all__ = ["check_node", "check_versions"]

_ROOM = 3  # copies of what a client keeps: the file, the one that takes its place, and that of another run
_GIB = 2**30


def check_node(
    settings: Mapping[str, Any], node_config: str, connection: Connection, server_versions: str = ""
) -> Page:
    """Return the page of a node. Nothing of its data, its model or its counts leaves the process.

    Args:
        settings: those of the run.
        node_config: the text of ``flower-supernode --node-config``.
        connection: how the node reaches the server.
        server_versions: what ``fedbn-flwr --version`` prints on the server.
    """
    with as_network_node():
        return Page((*_of_node(settings, node_config), *check_versions(server_versions), *check_connection(connection)))


def _of_node(settings: Mapping[str, Any], node_config: str) -> Iterator[Finding]:
    """Yield what is found about the settings, the data and a round."""
    try:
        config = Config.make(settings)
    except FedBNError as error:
        yield fault("config", str(error))
        return
    yield ok("config", f"{config.title}, dataset={config.dataset}, model={config.model}, norm={config.norm}")
    try:
        node = node_config_of(node_config)
        context = Context(1, 1, node, RecordDict(), config.to_mapping())
        check_run(context)
    except FedBNError as error:
        yield fault("node-config", _plain(error))
        return
    try:
        with _warnings() as logged:
            client = client_fn(context)
            report = node_report(config, context)
    except ConfigError as error:
        yield fault("node-config", _plain(error))
        return
    except (FedBNError, OSError) as error:
        yield fault("data", str(error))
        return
    except Exception as error:  # a file of any kind, or the user's code
        yield fault("data", f"{type(error).__name__}: {error}")
        return
    others = [line for line in logged if not line.endswith(report.warnings)]
    yield from _of_data(client, config, report.text(), (*others, *report.warnings))
    if not len(client.train_data):
        return
    yield from _of_round(client, config, node)


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Gather what is logged as a warning in the block; it is not printed."""
    lines: list[str] = []

    class Gather(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("flwr"), Gather(logging.WARNING)
    before, logger.handlers = logger.handlers, [handler]
    try:
        yield lines
    finally:
        logger.handlers = before


def _of_data(client: TorchClient, config: Config, report: str, warnings: tuple[str, ...]) -> Iterator[Finding]:
    """Yield what is found about the data that were read; they fit the model, or reading them had failed."""
    counts = {"training": len(client.train_data), **{name: len(data) for name, data in client.test_sets.items()}}
    shape = tuple(config.example_shape())
    yield ok("data", f"{report}\nthe run's model takes {shape} and has {config.num_outputs()} outputs: they fit.")
    for line in warnings:
        yield warning("data", line)
    if not counts["training"]:
        yield fault("data", "there is no training example. Give this node data, or leave it out.")
    if not counts.get("own", 0):
        needed = any(name.startswith("personal") for name in config.evaluations())
        text = "the test part is empty: no test of this site counts. Give it test examples, or a larger test-share."
        yield (fault if needed else warning)("test-part", text)


def _of_round(client: TorchClient, config: Config, node: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what is found in short rounds, and what a whole one needs."""
    folder = str(node.get(STATE_DIR, "")) or ("" if config.state_dir == "out" else config.state_dir)
    state = Path(os.path.expanduser(folder)) if folder else None
    if state and (problem := _not_writable(state)):
        yield fault("disk", problem)
        return
    try:
        with _warnings():  # of the server's side
            trial = try_rounds(config, node, len(client.train_data), state)
    except OSError as error:
        yield fault("disk", f"{error}. Make room there, or name another state-dir.")
        return
    except Exception as error:  # of the user's model, or of the method
        yield fault("training", _plain(error))
        return
    parts = ", ".join(sorted(trial.seconds))
    left_out = [key for key, on in (("masked-sums", config.masked_sums), (f"dp={config.dp}", config.dp != "off")) if on]
    alone = f" Left out, since they need other clients: {', '.join(left_out)}." if left_out else ""
    yield ok("training", f"one step of each part was done here ({parts}).{alone}")
    yield _seconds(trial)
    yield from _memory(trial)
    yield from _room(trial, state)


def _seconds(trial: Trial) -> Finding:
    each = ", ".join(f"{kind} {seconds:.2f} s" for kind, seconds in sorted(trial.seconds.items()))
    return ok(
        "round",
        f"{trial.round:.1f} s for a whole round of {trial.steps} steps ({trial.step:.4f} s each): {each}. Over a "
        "network each message also starts a process (2 to 3 s), and the model travels.",
    )


def _memory(trial: Trial) -> Iterator[Finding]:
    whole = memory_bytes()
    gpu = f", and {trial.gpu_memory / _GIB:.2f} GiB of the GPU" if trial.gpu_memory else ""
    text = f"{trial.memory / _GIB:.2f} GiB at most{gpu}; this machine or container has {whole / _GIB:.1f} GiB."
    yield (warning if trial.memory > 0.8 * whole else ok)("memory", text)


def _not_writable(state: Path) -> str:
    """Return why nothing can be kept in a folder; "" if it can."""
    if not state.is_absolute():
        return f"state-dir={str(state)!r} is relative, and a node's processes run in other folders. Write it in full."
    try:
        state.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=state):
            return ""
    except OSError as error:
        return f"state-dir={str(state)!r} cannot be written: {error}. Name a folder that this user may write."


def _room(trial: Trial, state: Path | None) -> Iterator[Finding]:
    """Yield whether the disk has room for what the method leaves with the node."""
    if state is None:
        yield untried(
            "disk", "there is no state-dir: what a method leaves with the node is in memory, and ends with it."
        )
        return
    free, needed = shutil.disk_usage(state).free, _ROOM * trial.kept
    text = f"a run leaves {trial.kept:,} bytes in state-dir={str(state)!r}, which has {free:,} bytes free"
    if free < needed:
        yield fault("disk", f"{text}: {needed:,} are needed. Make room, or name another state-dir.")
    else:
        yield ok("disk", f"{text}.")


def check_versions(server: str) -> Iterator[Finding]:
    """Yield how the versions here differ from the server's."""
    here = own_versions()
    told = as_text(here)
    if not server:
        yield untried("versions", f"{told}; --server-versions TEXT compares what fedbn-flwr --version prints there.")
        return
    found = differences(here, server)
    if not found:
        yield ok("versions", f"{told}, as on the server.")
    for text, serious in found:
        yield (fault if serious else warning)("versions", text)


def _plain(error: Exception) -> str:
    """Return the text of an error without the code with which it travels."""
    name = "" if isinstance(error, FedBNError) else f"{type(error).__name__}: "
    return name + split_code(str(error))[1]
