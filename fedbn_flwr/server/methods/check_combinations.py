"""The check for methods that cannot be combined, from their phases."""

from __future__ import annotations

from typing import Any

from fedbn_flwr.server.methods.method import Method
from fedbn_flwr.server.methods.phases import in_common, single_decisions


def why_not_combined(
    first: type[Method[Any, Any]], second: type[Method[Any, Any]]
) -> str:
    """Return why two methods cannot be combined, or "" if they can."""
    for kind in (first, second):
        if kind.alone or not kind.role:
            return kind.alone or f"{kind.name} is not combined with other methods"
    # Use the defaults: the settings do not change whether a pair is allowed.
    whole = {kind: kind(kind.Params()).whole for kind in (first, second)}
    both = single_decisions(whole[first]) & single_decisions(whole[second])
    if both:
        return f"both decide {' and '.join(sorted(both))}"
    for one, other in ((first, second), (second, first)):
        kept = in_common(whole[one]) & whole[other].local
        if kept:
            return (
                f"{one.name} needs {', '.join(sorted(kept))} in common, but"
                f" {other.name} keeps them with the clients"
            )
    return ""
