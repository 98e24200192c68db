"""What a run may ask of a node: the paths and modules that the server names.

A node's own settings win always. ``allow-paths`` and ``allow-modules`` of its config
say what a run may name besides them; over a network nothing, unless they say so, and on
one machine everything. They hold where the node's operator has chosen the app: an app
that comes with the run is code, and reads and writes what its process may.
"""

from __future__ import annotations

import os
from pathlib import Path

from flwr.app import Context

from fedbn_flwr.compat.flower import on_network_node
from fedbn_flwr.errors import NOT_ALLOWED, ConfigError
from fedbn_flwr.messages.protocol import ALLOW_MODULES, ALLOW_PATHS, Key

__all__ = ["check_module", "check_path"]


def check_path(context: Context, key: str, path: str) -> None:
    """Refuse a path of the run's config that lies in no folder of the node's
    ``allow-paths``, symbolic links resolved.

    Raises:
        ConfigError: it does not. The text has nothing of the node, so that it is the
            same for all nodes.
    """
    allowed = _allowed(context, ALLOW_PATHS)
    if allowed is None:
        return
    real = Path(os.path.expanduser(path)).resolve()
    if any(real.is_relative_to(Path(folder).resolve()) for folder in allowed):
        return
    raise ConfigError(
        f"{key}={path!r} is a path of this run's config, and a node opens those alone"
        " that its operator allows. On the node, add to --node-config"
        f" {ALLOW_PATHS}='FOLDER', a comma list of absolute folders; or leave {key}"
        " out.",
        code=NOT_ALLOWED,
    )


def check_module(context: Context, key: str, module: str) -> None:
    """Refuse a module of the run's config that is not in the node's ``allow-modules``,
    nor in a package of it.

    Raises:
        ConfigError: it is not. The text has nothing of the node, so that it is the same
            for all nodes.
    """
    allowed = _allowed(context, ALLOW_MODULES)
    if allowed is None or any(f"{module}.".startswith(f"{name}.") for name in allowed):
        return
    raise ConfigError(
        f"{key}={module!r} is a module of this run's config, and a node imports those"
        " alone that its operator allows. On the node, add to --node-config"
        f" {ALLOW_MODULES}='MODULE', a comma list; or use a model of the package.",
        code=NOT_ALLOWED,
    )


def _allowed(context: Context, key: Key) -> list[str] | None:
    """Return the entries of a comma list in the node's config; None = everything."""
    if key not in context.node_config and not on_network_node():
        return None
    entries = str(context.node_config.get(key, "")).split(",")
    return [entry.strip() for entry in entries if entry.strip()]
