"""The client code for other people's apps, such as the mod ``bn_mod``."""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable

from fedbn_flwr.client.answers import answer_query, answer_statistics
from fedbn_flwr.client.bn_rules import Hooks, bn_rules
from fedbn_flwr.client.fixed import with_fixed
from fedbn_flwr.client.message_app import seeding
from fedbn_flwr.client.mod import apply_mod
from fedbn_flwr.client.packed import packed
from fedbn_flwr.client.update_clipping import clipped_update
from fedbn_flwr.errors import NamedConfigErrors
from fedbn_flwr.legacy.legacy_messages import with_names

__all__ = [
    "Hooks",
    "answer_query",
    "answer_statistics",
    "bn_mod",
    "bn_rules",
    "clipped_update",
    "packed",
]


_apply_mod = with_names(apply_mod)


@NamedConfigErrors()
def bn_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Return the app's reply after applying the client code of any strategy.

    It is a Flower mod. The app's functions receive the whole model, in the order of the
    server's first message, and reply with the whole model. The mod adds the local
    entries before the call and removes them after it. It checks names, layer types and
    shapes. It keeps the local entries in ``Context.state``, and also on disk if the
    node's or the run's config names a ``state-dir`` and the server sends its run
    (``strategy.continuity``). If the strategy needs no client code, the arrays are
    unchanged. During the app's function, the default generators of torch, NumPy and
    Python are seeded for each message, so that the draws of the function repeat. The
    draws of other mods do not repeat.

    The mod also works on the messages of ``to_legacy``:
    ``ClientApp(client_fn, mods=[bn_mod])``.

    Example, with ``build_model`` and ``arrays`` as in the example of
    ``InProcessGrid``::

        >>> from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
        >>> from flwr.clientapp import ClientApp
        >>> from fedbn_flwr.mods import bn_mod, bn_rules
        >>> own_app = ClientApp(mods=[bn_mod])
        >>> @own_app.train()
        ... def train(msg, context):
        ...     model = build_model()
        ...     model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        ...     with bn_rules(model, msg, context) as rules:
        ...         sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        ...         optimizer = rules.wrap(sgd)
        ...         for _ in range(5):
        ...             optimizer.zero_grad()
        ...             model(torch.randn(8, 4)).square().mean().backward()
        ...             optimizer.step()
        ...     content = RecordDict({"arrays": ArrayRecord(model.state_dict())})
        ...     content["metrics"] = MetricRecord({"num-examples": 40})
        ...     return Message(content, reply_to=msg)
        >>> with InProcessGrid(own_app, num_nodes=3) as grid:
        ...     result = FedBN(fraction_evaluate=0).start(grid, arrays, num_rounds=2)
        >>> result.arrays["1.weight"] == arrays["1.weight"]  # gamma stays
        True

    Raises:
        StateError: an entry was neither sent nor kept here, the local state belongs to
            another model or is not finite, or the app's reply is not the whole model.
        ConfigError: the app's model created further entries in a forward pass.
    """
    # The mod completes the model, so that everything behind it sees the whole model.
    seeded = seeding(message, context, call_next)
    return with_fixed(message, context, lambda msg, own: _apply_mod(msg, own, seeded))
