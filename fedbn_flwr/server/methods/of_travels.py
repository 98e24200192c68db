"""The problems that follow from the declarations of a run's methods (``Travels``).

A method declares the parts that travel, stay and freeze. This module derives the
settings without effect, the excluded tests and combinations, the layers that the model
must have, and the entries that all clients must have in common.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from fedbn_flwr.batchnorm.parts import Part, Parts, tied_apart
from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.messages.protocol import NUM_EXAMPLES
from fedbn_flwr.problems import Known, Problem
from fedbn_flwr.server.methods.method import Method
from fedbn_flwr.server.methods.params import RECALIBRATED
from fedbn_flwr.server.methods.shared_bn import SHARED_BN
from fedbn_flwr.server.methods.travels import (
    ALL,
    TRACKED,
    Travels,
    acts_on_batchnorm,
    in_common,
    model_needs,
    needs_all_layers,
    single_decisions,
    together,
)

_NEEDED = {Part.AFFINE: "gamma and beta", Part.STATISTICS: "running statistics"}
_WITHOUT = {
    Part.AFFINE: "affine=False",
    Part.STATISTICS: "track_running_stats=False",
}
_NONE_FOUND_BY_NAME = (
    "no BatchNorm that is recognised by the names of its arrays (BatchNorm without"
    " running statistics is found only with parts=split_state(model))"
)


def of_travels(methods: Any, known: Known) -> Iterator[Problem]:
    """Yield the problems that follow from the declarations of the methods.

    ``methods``: the methods of a run, ``together.Methods``.
    """
    yield from _of_tests(methods, known)
    yield from _of_settings(methods, known)
    for method in methods:
        yield from _of_statistics(method, known)
        yield from _of_phases(method, known)
    if known.parts is None:
        return
    # Standalone shares nothing with any model, and its texts state it.
    kept = known.parts.select(methods.local)
    if kept and kept == known.parts.names and methods.local != ALL:
        yield _misfit(
            "nothing-shared",
            f"{methods.name} keeps every entry with the clients, but {known.model} has"
            " none to share",
            "standalone, or fewer personal entries",
            "personal",
        )
    by_numbers = (
        " If they are two tensors that start with the same numbers, pass"
        " parts=split_state(model)."
    )
    yield from tied_apart(known.parts.tied, kept, by_numbers * known.parts.by_names)
    for method in methods:
        yield from _of_layers(method, known, known.parts)
        yield from _of_personal(method, known, known.parts)


def _misfit(code: str, text: str, remedy: str, keys: str = "strategy") -> Problem:
    """Return the problem of a model that does not fit."""
    return Problem(code, text, keys, stage="model", remedy=remedy, error=NormLayerError)


def _unused(code: str, text: str, keys: str) -> Problem:
    """Return the problem of a setting without effect."""
    return Problem(code, text, keys, stage="settings", effect="no-effect")


def _of_tests(methods: Any, known: Known) -> Iterator[Problem]:
    """Yield the tests that have no model under these methods."""
    local, tests = methods.local, known.tests or ()
    weights = local & {Part.AFFINE, Part.REST, Part.PERSONAL}
    if (methods.reestimates or RECALIBRATED in tests) and weights:
        # StaticBN re-estimates always: only personal entries can be left out.
        asks = "recalibrate" if methods.params.recalibrate else "personal"
        yield Problem(
            "no-global-weights",
            f"strategy {methods.name!r} keeps {' and '.join(sorted(weights))} with its"
            " clients, so there are no global weights to re-estimate statistics with"
            " (recalibrate, eval-on=recalibrated).",
            "eval_on" if RECALIBRATED in tests else asks,
            stage="settings",
        )
    asked = [name for name in tests if name.startswith("global")]
    if Part.REST in local and asked:
        yield Problem(
            "no-global-model",
            f"eval-on={','.join(asked)} tests a global model, but strategy"
            f" {methods.name!r} has none: its clients share nothing, so the test would"
            " measure the initial model. Use personal-own or personal-global.",
            "eval_on",
            stage="settings",
        )
    if SHARED_BN in tests and (not local - {Part.REST} or Part.REST in weights):
        yield Problem(
            "no-local-batchnorm",
            f"eval-on={SHARED_BN} completes a global model with the average of the BN"
            f" parts that clients keep, but strategy {methods.name!r} has no such model."
            " Use it with fedbn, silobn or mtfl.",
            "eval_on",
            stage="settings",
        )


def _of_settings(methods: Any, known: Known) -> Iterator[Problem]:
    """Yield the problems of settings that every method has."""
    chosen = methods.params.layers or (known.parts and known.parts.averaged)
    for method in methods:
        if chosen and needs_all_layers(together(declared(method))):
            yield Problem(
                "all-layers",
                f"{method.title} measures the statistics of all BatchNorm layers"
                " together, and cannot act on some of them: leave out layers",
                "layers",
                stage="settings",
            )
    if methods.whole.exchanges and known.weighted_by_key not in (None, NUM_EXAMPLES):
        yield Problem(
            "synchronised-weights",
            f"{methods.name} synchronises with the weights of {NUM_EXAMPLES!r}, but"
            f" weighted_by_key={known.weighted_by_key!r} averages with other weights:"
            " leave it out",
            "weighted_by_key",
        )
    if not acts_on_batchnorm(methods.whole):
        yield _unused(
            "no-layers",
            f"{methods.name} treats BatchNorm like all other layers",
            "layers",
        )
    if Part.REST in methods.local:
        yield _unused(
            "all-personal",
            f"with {methods.name} the whole model stays with the client",
            "personal",
        )
    personal = [test for test in known.tests or () if test.startswith("personal")]
    if known.tests and not personal:
        yield _unused(
            "no-client-tests",
            "no client tests its model (eval-on=personal-own)",
            "fine_tune eval_on",
        )
    if Part.STATISTICS in methods.local and SHARED_BN not in (known.tests or ()):
        yield _unused(
            "no-variances", f"{methods.name} averages no running variances", "variance"
        )


def reestimates(method: Method[Any, Any]) -> bool:
    """Return whether a method re-estimates statistics in one of its phases."""
    return any(phase.reestimates for phase in declared(method))


def _of_statistics(method: Method[Any, Any], known: Known) -> Iterator[Problem]:
    """Yield the problems of statistics that a method sets instead of BatchNorm."""
    # BN's momentum only moves running statistics, and here all of them are frozen.
    if all(phase.frozen & TRACKED for phase in declared(method)):
        text = f"{method.name} tracks no running variances in training"
        yield _unused("untracked", text, "variance")
        yield _unused("untracked", text, "bn_momentum")
    if method.role != "option" and reestimates(method):
        yield _unused(
            "always-re-estimated", f"{method.name} always re-estimates", "recalibrate"
        )


def _of_phases(method: Method[Any, Any], known: Known) -> Iterator[Problem]:
    """Yield the phases that the run is too short for."""
    for phase in declared(method, known.num_rounds):
        rounds, after = known.num_rounds, phase.after
        if rounds is None or after is None or after < rounds:
            continue
        setting = phase.after_setting
        key = setting.replace("_", "-")
        yield Problem(
            "phase-never-begins",
            f"{method.name}: {key}={getattr(method.params, setting)} means after round"
            f" {after} at the earliest, and the run has {rounds} rounds: the phase never"
            " begins, unless the run is resumed with more rounds",
            setting,
            effect="warn",
            remedy=f"a smaller {key} or more rounds",
        )


def _of_layers(
    method: Method[Any, Any], known: Known, parts: Parts
) -> Iterator[Problem]:
    """Yield the layers or entries that a method needs and the model lacks."""
    # A layer with personal entries is still a layer of the model.
    parts = dataclasses.replace(parts, personal=())
    # Either the model has no layer, or no layer has the parts that the method needs.
    for wanted in model_needs(together(declared(method))):
        if not parts.layers:
            has = _NONE_FOUND_BY_NAME if parts.by_names else known.has
            yield _misfit(
                "no-batchnorm",
                f"{method.title} needs BatchNorm, but {known.model} has"
                f" {known.untrained or has}",
                f"{method.instead}, or a model with BatchNorm",
            )
        elif wanted and not parts.select(wanted):
            named = [part for part in _NEEDED if part in wanted]
            kind = f"BatchNorm with {' or '.join(_NEEDED[part] for part in named)}"
            reasons = ", ".join(_WITHOUT[part] for part in named)
            has = f"{parts.named_layers()} without ({reasons})"
            yield _misfit(
                "batchnorm-lacks-entries",
                f"{method.title} needs {kind}, but {known.model} has"
                f" {known.untrained or has}",
                f"{method.instead}, or a model with {kind}",
            )


def _of_personal(
    method: Method[Any, Any], known: Known, parts: Parts
) -> Iterator[Problem]:
    """Yield the personal entries that a method needs in common."""
    common = in_common(together(declared(method)))
    # The method does not act on layers outside ``layers``.
    by_type = dataclasses.replace(parts, personal=()).part_of
    needed = [name for name in parts.personal if by_type[name] in common]
    if needed:
        named = ", ".join(dict.fromkeys(by_type[name] for name in needed))
        yield _misfit(
            "personal-in-common",
            f"{method.title} needs the {named} of all clients in common, but"
            f" {known.model} has '{needed[0]}' among its personal entries"
            f" ({len(needed)} such)",
            f"{method.instead}, or leave them out of personal",
            "personal",
        )


# --- declarations of methods ----------------------------------------------------------
def declared(
    method: Method[Any, Any], num_rounds: int | None = None
) -> tuple[Travels, ...]:
    """Return the declaration of each phase of a method.

    If a class overrides ``aggregate`` below the class that declares ``travels``, it may
    read everything in the replies.
    """
    phases = method.travels(num_rounds)
    if reads_undeclared(type(method)):
        return tuple(dataclasses.replace(one, each=ALL) for one in phases)
    return phases


def reads_undeclared(kind: type[Method[Any, Any]]) -> bool:
    """Return whether ``aggregate`` may read more than ``travels`` declares."""
    # The class nearer to ``kind`` decides. A class with both functions declares all
    # entries that it reads.
    for base in kind.__mro__:
        if "travels" in vars(base):
            return False
        if "aggregate" in vars(base):
            return True
    return False


def why_not_combined(
    first: type[Method[Any, Any]], second: type[Method[Any, Any]]
) -> str:
    """Return why two methods cannot be combined, or "" if they can."""
    for kind in (first, second):
        if kind.alone or not kind.role:
            return kind.alone or f"{kind.name} is not combined with other methods"
    # Use the defaults: the settings do not change whether a pair is allowed.
    travels = {
        kind: together(declared(kind(kind.Params()))) for kind in (first, second)
    }
    both = single_decisions(travels[first]) & single_decisions(travels[second])
    if both:
        return f"both decide {' and '.join(sorted(both))}"
    for one, other in ((first, second), (second, first)):
        kept = in_common(travels[one]) & travels[other].local
        if kept:
            return (
                f"{one.name} needs {', '.join(sorted(kept))} in common, but"
                f" {other.name} keeps them with the clients"
            )
    return ""
