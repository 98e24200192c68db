"""What a method takes from clients, or lets them keep, that a protection does not cover: why it is refused."""

from __future__ import annotations

from fedbn_flwr.server.methods import Methods
from fedbn_flwr.server.sent_beside import sent_beside

__all__ = ["beside_models", "beside_sums", "kept_between_rounds"]


def beside_models(methods: Methods) -> list[str]:
    """Return what the methods take from clients beside the update or the model, which gets noise."""
    return [beside.text for beside in sent_beside(methods)]


def beside_sums(methods: Methods) -> list[str]:
    """Return what the methods take from single clients that is no sum over them."""
    return [beside.text for beside in sent_beside(methods) if not beside.masked]


def kept_between_rounds(methods: Methods) -> list[str]:
    """Return what clients keep from rounds with client-level noise, which does not cover it, for rounds of DP-SGD."""
    problems, scope = [], methods.params.momentum_scope
    if methods.local:
        problems.append(
            f"{', '.join(sorted(methods.local))} stay with the clients, which train them without noise until BN is "
            "frozen: every gradient of DP-SGD would then depend on each example"
        )
    if scope != "none":
        problems.append(f"momentum-scope={scope} carries gradients without noise into rounds of DP-SGD")
    return problems
