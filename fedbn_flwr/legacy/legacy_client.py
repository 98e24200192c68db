"""A ClientApp of Flower's older kind, with its mods, for ``start_client``.

::

    app = ClientApp(client_fn, mods=[bn_mod])
    start_client(
        server_address="127.0.0.1:8080",
        client_fn=to_client_fn(app, {"partition-id": 0}),
    )
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.client import Client
from flwr.clientapp import ClientApp
from flwr.common import (
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    GetPropertiesIns,
    GetPropertiesRes,
)

from fedbn_flwr.compat.flower import identify_process, legacy_records
from fedbn_flwr.errors import ConfigError, StateError


def to_client_fn(
    app: ClientApp, node_config: Mapping[str, Any] | None = None
) -> Callable[[Context], Client]:
    """Return the app as the ``client_fn`` of ``start_client``.

    ``start_client`` itself takes no mods and no node config. ``start_simulation`` also
    accepts the result.

    Args:
        app: ``ClientApp(client_fn, mods=[...])``.
        node_config: the config of a SuperNode, ``{"partition-id": 0}`` and the
            ``state-dir``.

    Raises:
        ConfigError: the app is not a ClientApp, for example only a ``client_fn``.
    """
    if not isinstance(app, ClientApp):
        raise ConfigError(
            f"to_client_fn takes a ClientApp, but app={app!r:.80} is not one. Write"
            " to_client_fn(ClientApp(client_fn, mods=[bn_mod]), node_config)"
        )
    own = dict(node_config or {})

    def client_fn(context: Context) -> Client:
        context.node_config = {**context.node_config, **own}
        return _AppClient(app, context)

    return client_fn


class _AppClient(Client):
    """A client that passes each call to an app, as the original message of the call."""

    def __init__(self, app: ClientApp, context: Context) -> None:
        self._app = app
        self._context = context

    def get_properties(self, ins: GetPropertiesIns) -> GetPropertiesRes:
        res: GetPropertiesRes = self._answer("get_properties", ins)
        return res

    def fit(self, ins: FitIns) -> FitRes:
        res: FitRes = self._answer("train", ins)
        return res

    def evaluate(self, ins: EvaluateIns) -> EvaluateRes:
        res: EvaluateRes = self._answer("evaluate", ins)
        return res

    def _answer(self, kind: str, ins: Any) -> Any:
        # The process of start_client has no identity, but messages need one.
        identify_process(1)
        write, read = legacy_records(kind)
        content: RecordDict = write(ins)
        reply = self._app(Message(content, self._context.node_id, kind), self._context)
        if reply.has_error():  # a mod of Flower has refused the message
            raise StateError(reply.error.reason)
        return read(reply.content)
