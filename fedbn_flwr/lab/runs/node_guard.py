"""The guard of a node. It refuses paths of a run's config, and withholds errors."""

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
from fedbn_flwr.lab.config.check_config import own_modules
from fedbn_flwr.lab.data import KINDS
from fedbn_flwr.lab.own_code import is_function
from fedbn_flwr.messages.protocol import REPORT_DATA, STATE_DIR

logger = logging.getLogger("flwr")


@NamedConfigErrors()
def check_run(context: Context) -> None:
    """Check the paths and modules that the run's config names, before they are read.

    Raises:
        ConfigError: the node does not allow a path or a module.
    """
    for key, path in _paths(context):
        check_path(context, key, path)
    for key, module in own_modules(context.run_config).items():
        check_module(context, key, module)


def guarded(
    message: Message, context: Context, call_next: ClientAppCallable
) -> Message:
    """Refuse runs that the node forbids, and withhold texts that may repeat its data.

    It is a mod of Flower.
    """
    check_run(context)
    try:
        return call_next(message, context)
    except Exception as error:
        if not _is_withheld(error, context):
            raise
        # Flower logs both errors on the node, but sends only the text of this error to
        # the server.
        raise FedBNError(reason(error, context)) from error


def reason(error: Exception, context: Context) -> str:
    """Return the text of an error for the server.

    If the node withholds this text, return only the type of the error.
    """
    if not _is_withheld(error, context):
        return str(error)
    logger.error("withheld from the server: %s: %s", type(error).__name__, error)
    return (
        f"{type(error).__name__}. Its text is only in the node's log because it may"
        f" repeat data of the node. Set {REPORT_DATA}=true in the node's config to send"
        " it to the server."
    )


def _paths(context: Context) -> Iterator[tuple[str, str]]:
    """Yield (key, path) of each path in the run's config that the node would open."""
    dataset, data_dir, out, state_dir = (
        str(context.run_config.get(key, ""))
        for key in ("dataset", "data-dir", "out", STATE_DIR)
    )
    path = _path_of_data(dataset)
    if path:
        yield "dataset", path
    if data_dir:
        yield "data-dir", data_dir
    # A state folder in the node's own config needs no permission, unless it is "out":
    # then the run's config determines the path.
    own = str(context.node_config.get(STATE_DIR, ""))
    if (own or state_dir) == STATE_IN_OUT:
        yield "out", out
    elif state_dir and not own:
        yield STATE_DIR, state_dir


def _path_of_data(dataset: str) -> str:
    """Return the path in ``KIND:PATH``, or "" without a path and for a function."""
    if is_function(dataset, KINDS):
        return ""
    return dataset.partition(":")[2]


def _is_withheld(error: Exception, context: Context) -> bool:
    """Return whether the text of an error stays on this node of a network.

    Most errors of this package name only settings and entries of the model. But a
    DataError may quote data. If the run's config names data by their path or by a
    function, a ConfigError may quote these data as well.
    """
    allowed = str(context.node_config.get(REPORT_DATA, "")).lower() == "true"
    if allowed or not on_network_node():
        return False
    if isinstance(error, ConfigError):
        dataset = str(context.run_config.get("dataset", ""))
        return bool(_path_of_data(dataset)) or is_function(dataset, KINDS)
    if isinstance(error, DataError):
        return error.code != ABOUT_THE_RUN
    # Withhold errors of torch, NumPy and the user's code, because they may quote any
    # value of the data.
    return not isinstance(error, FedBNError)
