"""A run of the package against the reference: every entry, kept state and test."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fedbn_flwr.errors import FedBNError
from tests.reference import package
from tests.reference.draws import Case, refusal
from tests.reference.federation import AllRefuse, Federation
from tests.reference.methods import methods_of

RELATIVE = {"float64": 1e-8, "float32": 2e-3}
MOVED = {"float64": 1e-13, "float32": 1e-6}
Entries = Mapping[str, Tensor]


def wanted(case: Case) -> package.Result:
    """The reference's result."""
    fed = Federation(case, package.data_of(case), methods_of)
    found = package.Result([])
    for _ in range(case.rounds):
        fed.round()
        tested = fed.tested()
        found.history.append(tested)
        found.used |= fed.used
        tests = {str(c.number): fed.test(c, tested) for c in fed.present(fed.t)}
        found.tests.append(
            {name: {"loss": x} for name, x in tests.items() if x is not None}
        )
    for client in fed.clients:
        found.own[client.number] = client.own
        found.kept[client.number] = _kept(fed, client.kept)
    return found


def _kept(fed: Federation, kept: Mapping[str, Any]) -> dict[str, Tensor]:
    """What a client keeps besides entries of the model, by the package's names."""
    hook = "BNControlVariates" if fed.case.has("bn-scaffold") else "ControlVariates"
    entries = {}
    for name, value in kept.get("own-model", {}).items():
        entries[f"own-model/{name}"] = value
    for name, value in kept.get("scaffold", {}).items():
        entries[f"{hook}/{name}"] = value
    for name, first in fed.first_name.items():
        if first in kept.get("momentum", {}):
            entries[f"MomentumBuffers/{name}"] = kept["momentum"][first]
    for path, value in kept.get("alpha", {}).items():
        entries[f"HybridStatistics/{path}.alpha"] = value
    for path, (count, mean, var) in kept.get("moments", {}).items():
        start = f"{hook}/bn-variates/{path}"
        dtype = fed.state[f"{path}.running_mean"].dtype
        entries[f"{start}.count"] = torch.tensor(count)
        entries[f"{start}.mean"] = mean.to(dtype)
        entries[f"{start}.m2"] = (count * var).to(dtype)
    return entries


def differences(found: package.Result, right: package.Result, case: Case) -> list[str]:
    """What differs, in words."""
    return list(_differences(found, right, case))


def _differences(
    found: package.Result, right: package.Result, case: Case
) -> Iterator[str]:
    # A resumed run does not know whether a round before it was used.
    if found.used != right.used and case.again != "resume":
        yield f"a round was used: {found.used}, not {right.used}"
    for t, (one, other) in enumerate(zip(found.history, right.history, strict=True), 1):
        yield from _entries(f"round {t}", one, other, case)
    for i, own in right.own.items():
        yield from _entries(f"client {i} keeps", found.own[i], own, case)
        yield from _entries(f"client {i} keeps", found.kept[i], right.kept[i], case)
    for t, (one, other) in enumerate(zip(found.tests, right.tests, strict=True), 1):
        if one.keys() != other.keys():
            yield f"round {t}: {sorted(one)} test, not {sorted(other)}"
        elif case.dtype == "float64":
            for name, value in other.items():
                loss = one.get(name, {}).get("loss")
                if loss is None or abs(loss - value["loss"]) > 1e-7 * (1 + value["loss"]):
                    yield f"round {t}: client {name} tests {loss}, not {value['loss']}"


def _entries(where: str, found: Entries, right: Entries, case: Case) -> Iterator[str]:
    if found.keys() != right.keys():
        odd = found.keys() ^ right.keys()
        yield f"{where}: {sorted(odd)} only in one of the two"
        return
    for name, value in right.items():
        other = found[name]
        if (other.dtype, other.shape) != (value.dtype, value.shape):
            yield f"{where}: {name} is {other.dtype} {tuple(other.shape)}"
        elif value.is_floating_point():
            apart = (other.double() - value.double()).abs()
            allowed = RELATIVE[case.dtype] * (1e-2 + value.double().abs())
            if not bool((apart <= allowed).all()):
                yield f"{where}: {name} differs by {float(apart.max()):.2g}"
        elif not torch.equal(other, value):
            yield f"{where}: {name} is {other.tolist()}, not {value.tolist()}"


def check(case: Case) -> None:
    """Raise AssertionError if the package differs from the reference."""
    reason = refusal(case)
    try:
        right = package.Result([]) if reason else wanted(case)
    except AllRefuse:
        reason = "every client refuses"
    try:
        found = package.run(case)
    except FedBNError as error:
        assert reason, f"{case!r} was refused: {type(error).__name__}: {error}"
        return
    assert not reason, f"{case!r} must be refused: {reason}"
    wrong = differences(found, right, case)
    if wrong:
        moved = package.run(case, MOVED[case.dtype])
        rounding = differences(moved, found, case)
        assert rounding, f"{case!r}\n" + "\n".join(wrong[:8])
