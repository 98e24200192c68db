"""Error replies in words: what the client's side said, and what to do about it."""

from __future__ import annotations

from flwr.app import Message

from fedbn_flwr.compat.flower import is_mod_refusal

__all__ = ["MOD_ORDER", "error_text"]

MOD_ORDER = (
    "A mod of the app refuses messages that it was not made for. Put local_bn first, ClientApp(mods=[local_bn]), and "
    "give mods that act on training to the training function alone, @app.train(mods=[...]) or client_app(..., "
    "train_mods=[...])"
)


def error_text(reply: Message) -> str:
    """Return the error of an error reply, with advice where its cause is known."""
    reason = str(reply.error.reason)
    advice = ""
    if is_mod_refusal(reply):
        advice = f"{'' if reason.endswith('.') else '.'} {MOD_ORDER}."
    elif "fitins.parameters" in reason:
        advice = ". This ClientApp is built from a NumPyClient: make it with fedbn_flwr.client_app(client_fn)"
    return f"error {reply.error.code}: {reason}{advice}"
