"""Guards a node: what the config of a run may name there, and what the server may read
of an error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable

from fedbn_flwr.client.permissions import check_module, check_path
from fedbn_flwr.compat.flower import on_network_node
from fedbn_flwr.errors import (
    ABOUT_THE_RUN,
    ConfigError,
    DataError,
    FedBNError,
    NamedConfigErrors,
)
from fedbn_flwr.lab.config import STATE_IN_OUT
from fedbn_flwr.lab.data import KINDS
from fedbn_flwr.lab.models.own import is_own
from fedbn_flwr.lab.own_code import is_function
from fedbn_flwr.messages.protocol import REPORT_DATA, STATE_DIR

__all__ = ["guarded", "reason"]

logger = logging.getLogger("flwr")


@NamedConfigErrors()
def check_run(context: Context) -> None:
    """Check the paths and modules that the run's config names, before anything reads
    them.

    Raises:
        ConfigError: the node does not allow one.
    """
    for key, path in _paths(context):
        check_path(context, key, path)
    model = str(context.run_config.get("model", ""))
    if is_own(model):
        check_module(context, "model", model.partition(":")[0])
    if is_function(dataset := str(context.run_config.get("dataset", "")), KINDS):
        check_module(context, "dataset", dataset.partition(":")[0])


def guarded(
    message: Message, context: Context, call_next: ClientAppCallable
) -> Message:
    """Refuse a run that names what the node does not allow; withhold texts that may
    repeat its data: a Flower mod.
    """
    check_run(context)
    try:
        return call_next(message, context)
    except Exception as error:
        if not _is_withheld(error, context):
            raise
        # Flower logs both on the node, and sends this text alone
        raise FedBNError(reason(error, context)) from error


def reason(error: Exception, context: Context) -> str:
    """Return what the server is told of an error: its text, or its kind alone."""
    if not _is_withheld(error, context):
        return str(error)
    logger.error("withheld from the server: %s: %s", type(error).__name__, error)
    return (
        f"{type(error).__name__}, whose text stays in the node's log, since it may"
        f" repeat data of the node. {REPORT_DATA}=true in the node's config lets the"
        " server have it."
    )


def _paths(context: Context) -> Iterator[tuple[str, str]]:
    """Yield each path that a node would open for this run, with its key."""
    dataset, data_dir, out, state_dir = (
        str(context.run_config.get(key, ""))
        for key in ("dataset", "data-dir", "out", STATE_DIR)
    )
    if path := _path_of_data(dataset):
        yield "dataset", path
    if data_dir:
        yield "data-dir", data_dir
    own = str(context.node_config.get(STATE_DIR, ""))
    if (own or state_dir) == STATE_IN_OUT:
        yield "out", out
    elif state_dir and not own:
        yield STATE_DIR, state_dir


def _path_of_data(dataset: str) -> str:
    """Return the path in ``KIND:PATH``; "" where there is none, and for a function."""
    return "" if is_function(dataset, KINDS) else dataset.partition(":")[2]


def _is_withheld(error: Exception, context: Context) -> bool:
    """Return whether the text of an error stays here: over a network, if it may have
    something of a file's content.

    Errors of this package name settings and entries of the model, but for those of
    data. Where the run's config names data by their path or by a function, errors of
    the config may quote these data.
    """
    if (
        not on_network_node()
        or str(context.node_config.get(REPORT_DATA, "")).lower() == "true"
    ):
        return False
    if isinstance(error, ConfigError):
        dataset = str(context.run_config.get("dataset", ""))
        return bool(_path_of_data(dataset)) or is_function(dataset, KINDS)
    return not isinstance(error, FedBNError) or (
        isinstance(error, DataError) and error.code != ABOUT_THE_RUN
    )
