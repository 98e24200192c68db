"""Error messages and the base class."""

from __future__ import annotations

import pytest

from fedbn_flwr import errors


def test_unknown_name_suggests_the_nearest() -> None:
    error = errors.unknown_name("strategy", "fixbm", ["fedavg", "fixbn"])
    assert str(error) == "unknown strategy 'fixbm'. Did you mean 'fixbn'? Allowed: fedavg, fixbn."
    far = errors.unknown_name("strategy", 3, iter(["b", "a"]))
    assert str(far) == "unknown strategy 3. Allowed: a, b."


@pytest.mark.parametrize("name", [n for n in errors.__all__ if n.endswith("Error")])
def test_every_error_can_be_caught_by_the_base(name: str) -> None:
    assert issubclass(getattr(errors, name), errors.FedBNError)
