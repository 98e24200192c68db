"""The client hooks that a message names.

The methods, and the server's code in their files, are loaded when a message names a
hook. A client that trains FedAvg or FedBN loads none of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fedbn_flwr.problems import Known
from fedbn_flwr.training.client_hook import ClientHook
from fedbn_flwr.transport.hook_context import HookContext

__all__ = ["make_hooks", "refuse_on_client"]


def make_hooks(names: Collection[str], context: HookContext) -> dict[str, ClientHook]:
    """Return the client hooks, as ``strategies.make_hooks`` does."""
    if not names:
        return {}
    from fedbn_flwr import strategies

    return strategies.make_hooks(names, context)


def refuse_on_client(
    names: Collection[str], config: Mapping[str, Any], known: Known
) -> None:
    """Raise problems of the hooks' methods, as ``strategies.refuse_on_client`` does."""
    if names:
        from fedbn_flwr import strategies

        strategies.refuse_on_client(names, config, known)
