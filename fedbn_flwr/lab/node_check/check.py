"""The check of a node: its config, its data, two short rounds, its connection."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flwr.app import Context, RecordDict

from fedbn_flwr.client.torch_client import TorchClient
from fedbn_flwr.compat.flower import as_network_node, node_config_of
from fedbn_flwr.errors import ConfigError, FedBNError, split_code
from fedbn_flwr.lab.config import Config, data_of, method_of
from fedbn_flwr.lab.node_check.connection import Connection, check_connection
from fedbn_flwr.lab.node_check.page import Page, StepFinding
from fedbn_flwr.lab.node_check.trial_rounds import try_rounds
from fedbn_flwr.lab.runs.node import client_fn, describe_data
from fedbn_flwr.lab.runs.node_guard import check_run


def check_node(
    settings: Mapping[str, Any], node_config: str, connection: Connection
) -> Page:
    """Check a node, and return the findings as a page.

    The node's data, model and counts do not leave the process.

    Args:
        settings: the settings of the run.
        node_config: the text of ``flower-supernode --node-config``.
        connection: the connection from the node to the server.
    """
    with as_network_node():
        return Page((*_of_node(settings, node_config), *check_connection(connection)))


def _of_node(settings: Mapping[str, Any], node_config: str) -> Iterator[StepFinding]:
    """Yield the findings about the settings, the data and short rounds."""
    # Stop at the first fault, because each step needs the result of the step before.
    try:
        config = Config.make(settings)
    except FedBNError as error:
        yield StepFinding("fault", "config", str(error))
        return
    run = (
        f"{config.title}, dataset={config.dataset}, model={config.model},"
        f" norm={config.norm}"
    )
    yield StepFinding("ok", "config", run)

    # Make the client in the same way as a node does, including the node's checks of the
    # run.
    try:
        node = node_config_of(node_config)
        context = Context(1, 1, node, RecordDict(), config.to_mapping())
        check_run(context)
        with _warnings() as logged:
            client = client_fn(context)
            report = describe_data(config, context)
    except ConfigError as error:
        yield StepFinding("fault", "node-config", _plain(error))
        return
    except Exception as error:  # files and the user's code may raise any exception
        yield StepFinding("fault", "data", _plain(error))
        return
    shape, outputs = tuple(data_of(config).shape), data_of(config).num_outputs
    fits = f"the run's model takes {shape} and has {outputs} outputs, so they fit."
    yield StepFinding("ok", "data", f"{report}\n{fits}")
    for line in dict.fromkeys(logged):
        yield StepFinding("warning", "data", line)

    # Check the examples, then one step on them.
    yield from _of_examples(client, config)
    if len(client.data.train):
        yield _of_round(config, context.node_config)


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Yield a list that receives the log's warnings. They are not printed."""
    lines = []

    class Gather(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = logging.getLogger("flwr")
    before = logger.handlers
    logger.handlers = [Gather(logging.WARNING)]
    try:
        yield lines
    finally:
        logger.handlers = before


def _of_examples(client: TorchClient, config: Config) -> Iterator[StepFinding]:
    """Yield a finding for each absent kind of examples: training, test."""
    if not len(client.data.train):
        text = "there is no training example. Give this node data, or leave it out."
        yield StepFinding("fault", "data", text)
    if not len(client.data.tests.get("own", ())):
        needed = any(name.startswith("personal") for name in method_of(config).tests)
        text = (
            "the test part is empty, so no test of this site counts. Give it test"
            " examples, or a larger test-share."
        )
        yield StepFinding("fault" if needed else "warning", "test-part", text)


def _of_round(config: Config, node: Mapping[str, Any]) -> StepFinding:
    """Do two short rounds with only this node, and return the finding."""
    try:
        with _warnings():  # hides the server's warnings
            try_rounds(config, node)
    except OSError as error:
        text = f"{error}. Free space in state-dir, or set another state-dir."
        return StepFinding("fault", "training", text)
    except Exception as error:  # model and method may raise any exception
        return StepFinding("fault", "training", _plain(error))
    text = "one step of each part of a round was done here."
    left_out = []
    if config.dp != "off":
        left_out.append(f"dp={config.dp}")
    if left_out:
        text += f" Left out, because they need other clients: {', '.join(left_out)}."
    return StepFinding("ok", "training", text)


def _plain(error: Exception) -> str:
    """Return the text of an error without its code in brackets.

    The text of an error of another package begins with the error's type.
    """
    name = "" if isinstance(error, FedBNError) else f"{type(error).__name__}: "
    return name + split_code(str(error))[1]
