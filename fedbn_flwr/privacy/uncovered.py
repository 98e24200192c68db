"""What a method takes from clients, or lets them keep, that a protection does not cover: why it is refused."""

from __future__ import annotations

from typing import Any

from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.server.method import Method

__all__ = ["beside_models", "beside_sums", "kept_between_rounds"]

_SUMS = frozenset({"exchanges", "buffers", "statistics"})  # what a method may take beside updates: it is masked, too


def beside_models(method: Method[Any], noisy: str) -> list[str]:
    """Return what the method takes from clients beside what gets noise: ``noisy``, the update or the model."""
    remedy = f"; let its beside_updates() return what it takes from a client beside {noisy}"
    return [*method.beside_updates().values(), *_reads_replies(method, remedy)]


def beside_sums(method: Method[Any]) -> list[str]:
    """Return what the method takes from single clients that is no sum over them."""
    beside = method.beside_updates()
    found = [what for kind, what in beside.items() if kind not in _SUMS]
    if "statistics" in beside and Part.STATISTICS in method.local:
        found.append(beside["statistics"] + ", relative to global ones, which the clients do not have")
    return found + _reads_replies(
        method, ", and under masks gets one, their average; let its beside_updates() return what else it takes"
    )


def kept_between_rounds(method: Method[Any]) -> list[str]:
    """Return what clients keep from rounds with client-level noise, which does not cover it, for rounds of DP-SGD."""
    found, scope = [], method.params.momentum_scope
    if method.local:
        found.append(
            f"{', '.join(sorted(method.local))} stay with the clients, which train them without noise until BN is "
            "frozen: every gradient of DP-SGD would then depend on each example"
        )
    if scope != "none":
        found.append(f"momentum-scope={scope} carries gradients without noise into rounds of DP-SGD")
    return found


def _reads_replies(method: Method[Any], remedy: str) -> list[str]:
    """Return a line if a class of another project reads replies and does not say what it takes."""
    reads, says = {"combine", "weights", "check"}, "beside_updates"
    foreign = [one for one in type(method).__mro__ if not one.__module__.startswith(("fedbn_flwr.", "flwr."))]
    unknown = [one for one in foreign if vars(one).keys() & reads and says not in vars(one)]
    return [
        f"{one.__name__} reads replies in a method of its own{remedy} (super().beside_updates() if nothing)"
        for one in unknown[:1]
    ]
