"""A run equals the reference in every entry, kept state and test."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fedbn_flwr.errors import FedBNError
from tests.reference import package
from tests.reference.draws import Case, refusal
from tests.reference.federation import AllRefuse, Federation, wide
from tests.reference.methods import methods_of

RELATIVE = {"float64": 1e-8, "float32": 2e-3}
MOVED = {"float64": (1e-13,), "float32": (1e-7, 1e-6, 1e-5)}
NAMES_OF_KEPT = {
    "own-model": "own-model/{}",
    "scaffold": "variates/{}",
    "alpha": "mixed-statistics/{}.alpha",
}
Entries = Mapping[str, Tensor]


def wanted(case: Case) -> package.Result:
    """Return the reference's result."""
    fed = Federation(case, package.data_of(case), methods_of)
    found = package.Result()
    for t in range(1, case.rounds + 1):
        fed.round()
        found.used |= fed.used
        if not case.tests_after(t):
            found.tests.append({})
            continue
        found.history[t] = tested = fed.tested()
        tests = {str(c.number): fed.test(c, tested) for c in fed.present(fed.t)}
        found.tests.append(
            {name: {"loss": x} for name, x in tests.items() if x is not None}
        )
    if case.way == "command":
        return _in_the_folder(fed, found)
    for client in fed.clients:
        found.own[client.number] = client.own
        found.kept[client.number] = _kept(fed, client.kept)
    return found


def _in_the_folder(fed: Federation, found: package.Result) -> package.Result:
    """Return the models of a run's folder.

    These are the last model without local entries, and the model of each client.
    """
    last, tested = fed.case.rounds, fed.tested()
    averaged = fed.case.eval_on == "averaged-bn"
    absent = set() if averaged else set(fed.local)
    if fed.case.recalibrate and not fed.case.own_weights:
        absent -= fed.statistics | fed.counters
    shared = {name: v for name, v in tested.items() if name not in absent}
    found.history = {last: shared} if shared else {}
    for client in fed.clients:
        # Local entries exist only at a client that has begun. If the global model has all
        # entries, it is the model of the other clients.
        changed = fed.case.fine_tune or fed.case.measures_own_models
        found_there = client.begun or not absent or changed
        model = fed.tuned_model(client, tested)
        if model is not None and found_there:
            found.models[client.number] = model
    return found


def _kept(fed: Federation, kept: Mapping) -> dict[str, Tensor]:
    """Return a client's state beyond model entries, by the package's names."""
    entries = {}
    for key, theirs in NAMES_OF_KEPT.items():
        for name, value in kept.get(key, {}).items():
            entries[theirs.format(name)] = value
    for name, first in fed.first_name.items():
        if first in kept.get("momentum", {}):
            entries[f"momentum/{name}"] = kept["momentum"][first]
    return entries


def differences(
    found: package.Result, right: package.Result, case: Case, exact: bool = False
) -> dict[str, float]:
    """Return the differences and their sizes.

    If ``exact`` is true, they include differences below rounding.
    """
    return dict(_differences(found, right, 0.0 if exact else RELATIVE[case.dtype]))


def _differences(
    found: package.Result, right: package.Result, allowed: float
) -> Iterator[tuple[str, float]]:
    # If no round was used, the command writes no model, and the legacy loop ends before
    # the last test and the undoing of the last round.
    ended = found.way in ("legacy", "command") and not found.used
    for t, other in right.history.items():
        if t not in found.history and ended:
            continue
        yield from _entries(f"round {t}", found.history[t], other, allowed)
    for i, own in right.own.items() if not ended else ():
        yield from _entries(f"client {i} keeps", found.own[i], own, allowed)
        yield from _entries(f"client {i} keeps", found.kept[i], right.kept[i], allowed)
    if found.used and found.models.keys() != right.models.keys():
        yield f"{[*found.models]} have models, not {[*right.models]}", math.inf
        return
    for i in right.models if found.used else ():
        yield from _entries(
            f"the model of client {i}", found.models[i], right.models[i], allowed
        )
    if not found.used and not found.tests:  # the command wrote no results
        return
    for t, (one, other) in enumerate(zip(found.tests, right.tests, strict=True), 1):
        if not one and ended:
            continue
        if one.keys() != other.keys():
            yield f"round {t}: {sorted(one)} test, not {sorted(other)}", math.inf
            continue
        for name, value in other.items():
            apart = abs(one[name]["loss"] - value["loss"])
            if not apart <= 10 * allowed * (1 + value["loss"]):
                yield f"round {t}: the loss in the test of client {name}", apart


def _entries(
    where: str, found: Entries, right: Entries, allowed: float
) -> Iterator[tuple[str, float]]:
    if found.keys() != right.keys():
        odd = sorted(found.keys() ^ right.keys())
        yield f"{where}: {odd} only in one of the two", math.inf
        return
    for name, value in right.items():
        other = found[name]
        if (other.dtype, other.shape) != (value.dtype, value.shape):
            yield f"{where}: {name} is {other.dtype} {tuple(other.shape)}", math.inf
        elif value.is_floating_point() or value.is_complex():
            apart = (wide(other) - wide(value)).abs()
            if not bool((apart <= allowed * (1e-2 + wide(value).abs())).all()):
                yield f"{where}: {name}", float(apart.max())
        elif not torch.equal(other, value):
            yield f"{where}: {name} is {other.tolist()}, not {value.tolist()}", math.inf


def check(case: Case) -> None:
    """Raise AssertionError if the package differs from the reference.

    A difference is rounding if inputs that are moved in their last digits change the
    same number by a hundredth of it or more.
    """
    reason = refusal(case)
    try:
        right = package.Result() if reason else wanted(case)
    except AllRefuse:
        reason = "every client refuses"
    try:
        found = package.run(case)
    except FedBNError as error:
        if reason:
            return
        words = f"{case!r}\nwas refused: {type(error).__name__}: {error}"
        raise AssertionError(words) from error
    assert not reason, f"{case!r}\nmust be refused: {reason}"
    # A resumed run has no record of used rounds before it.
    if case.again != "resume":
        assert found.used == right.used, f"{case!r}\na round was used: {found.used}"
    wrong = differences(found, right, case)
    if wrong:
        # Inputs move both ways because rounding may decide a sign. FedYogi's step is an
        # example.
        moves = [
            differences(package.run(case, sign * step), found, case, exact=True)
            for step in MOVED[case.dtype]
            for sign in (1, -1)
        ]
        faults = [
            f"{what}: {apart:.2g}"
            for what, apart in wrong.items()
            if not max(one.get(what, 0.0) for one in moves) >= apart / 100
        ]
        assert not faults, f"{case!r}\n" + "\n".join(faults[:8])
