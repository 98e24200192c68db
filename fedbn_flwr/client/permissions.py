"""Permissions of a node for the paths and modules in a run's config.

A node's own settings always take precedence. ``allow-paths`` and ``allow-modules`` of
the node's config list the other paths and modules that a run may name. Without them, a
run may name nothing over a network, and everything on one machine. The rules protect a
node whose operator has chosen the app. An app that comes with the run is code, and can
read and write everything that its process can.
"""

from __future__ import annotations

import os
from pathlib import Path

from flwr.app import Context

from fedbn_flwr.compat.flower import on_network_node
from fedbn_flwr.errors import NOT_ALLOWED, ConfigError
from fedbn_flwr.messages.protocol import ALLOW_MODULES, ALLOW_PATHS


def check_path(context: Context, key: str, path: str) -> None:
    """Refuse a path of the run's config outside the folders of ``allow-paths``.

    Symbolic links are resolved.

    Raises:
        ConfigError: no folder contains the path. The text has no details of the node,
            so that it is equal for all nodes.
    """
    allowed = _allowed(context, ALLOW_PATHS)
    if allowed is None:
        return
    real = Path(os.path.expanduser(path)).resolve()
    if any(real.is_relative_to(Path(folder).resolve()) for folder in allowed):
        return
    raise ConfigError(
        f"{key}={path!r} is a path of this run's config, but a node opens only paths"
        " that its operator allows. On the node, add to --node-config"
        f" {ALLOW_PATHS}='FOLDER', a comma list of absolute folders; or leave {key}"
        " out.",
        code=NOT_ALLOWED,
    )


def check_module(context: Context, key: str, module: str) -> None:
    """Refuse a module of the run's config that the node's ``allow-modules`` lacks.

    Modules inside a listed package are allowed.

    Raises:
        ConfigError: the module is not allowed. The text has no details of the node, so
            that it is equal for all nodes.
    """
    allowed = _allowed(context, ALLOW_MODULES)
    if allowed is None or any(f"{module}.".startswith(f"{name}.") for name in allowed):
        return
    raise ConfigError(
        f"{key}={module!r} is a module of this run's config, but a node imports only"
        " modules that its operator allows. On the node, add to --node-config"
        f" {ALLOW_MODULES}='MODULE', a comma list; or use a {key} of the package.",
        code=NOT_ALLOWED,
    )


def _allowed(context: Context, key: str) -> list[str] | None:
    """Return the entries of a comma list in the node's config, or None for all."""
    if key not in context.node_config and not on_network_node():
        return None
    entries = str(context.node_config.get(key, "")).split(",")
    return [entry.strip() for entry in entries if entry.strip()]
