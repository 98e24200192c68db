"""The models, settings and tests that the methods of a run refuse.

They follow from the declarations of the methods (``Phase``): the needed layers, their
entries and the entries in common, settings without effect, tests without a model,
weights that do not fit, and phases that never begin. If only one method has a need, the
need is a row in the file of this method. A condition between two settings is
``only_if`` at the setting, in ``params``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from fedbn_flwr.batchnorm.parts import Part, tied_apart
from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.messages.protocol import NUM_EXAMPLES
from fedbn_flwr.problems import Known, Problem
from fedbn_flwr.server.methods.params import RECALIBRATED
from fedbn_flwr.server.methods.phases import (
    ALL,
    acts_on_batchnorm,
    in_common,
    model_needs,
)
from fedbn_flwr.server.methods.shared_bn import SHARED_BN

_NEEDED = {Part.AFFINE: "gamma and beta", Part.STATISTICS: "running statistics"}
_WITHOUT = {
    Part.AFFINE: "affine=False",
    Part.STATISTICS: "track_running_stats=False",
}
_NONE_FOUND_BY_NAME = (
    "no BatchNorm that is recognised by the names of its arrays (BatchNorm without"
    " running statistics is found only with parts=split_state(model))"
)


def problems_of_model(methods: Any, known: Known) -> Iterator[Problem]:
    """Yield the problems that the methods have with the model.

    ``methods``: the methods of a run, ``together.Methods``.
    """
    parts = known.parts
    if parts is None:
        return
    # Standalone never shares an entry, as its documentation states, so it is allowed.
    kept = parts.select(methods.local)
    if kept and kept == parts.names and methods.local != ALL:
        yield _misfit(
            "nothing-shared",
            f"{methods.name} keeps every entry with the clients, but {known.model} has"
            " none to share",
            "standalone, or fewer personal entries",
            "personal",
        )
    # If the split follows from names, the clients find tied entries.
    yield from tied_apart(parts.tied, kept)
    # Ignore the choice of personal entries: a layer with personal entries is still a
    # layer of the model.
    by_type = dataclasses.replace(parts, personal=())
    for method in methods:
        # Either the model has no layer, or no layer has the parts that the method needs.
        for wanted in model_needs(method.whole):
            if not by_type.layers:
                has = _NONE_FOUND_BY_NAME if parts.by_names else known.has
                yield _misfit(
                    "no-batchnorm",
                    f"{method.title} needs BatchNorm, but {known.model} has"
                    f" {known.untrained or has}",
                    f"{method.instead}, or a model with BatchNorm",
                )
            elif wanted and not by_type.select(wanted):
                named = [part for part in _NEEDED if part in wanted]
                kind = f"BatchNorm with {' or '.join(_NEEDED[part] for part in named)}"
                reasons = ", ".join(_WITHOUT[part] for part in named)
                has = f"{by_type.named_layers()} without ({reasons})"
                yield _misfit(
                    "batchnorm-lacks-entries",
                    f"{method.title} needs {kind}, but {known.model} has"
                    f" {known.untrained or has}",
                    f"{method.instead}, or a model with {kind}",
                )
        # Personal entries may be needed in common. Skip layers outside ``layers``,
        # because the method does not act on them.
        common = in_common(method.whole)
        needed = [name for name in parts.personal if by_type.part_of[name] in common]
        if needed:
            named = dict.fromkeys(by_type.part_of[name] for name in needed)
            yield _misfit(
                "personal-in-common",
                f"{method.title} needs the {', '.join(named)} of all clients in common,"
                f" but {known.model} has '{needed[0]}' among its personal entries"
                f" ({len(needed)} such)",
                f"{method.instead}, or leave them out of personal",
                "personal",
            )


def _misfit(code: str, text: str, remedy: str, keys: str = "strategy") -> Problem:
    """Return the problem of a model that does not fit."""
    return Problem(code, text, keys, stage="model", remedy=remedy, error=NormLayerError)


def problems_of_run(methods: Any, known: Known) -> Iterator[Problem]:
    """Yield the problems of the weights and of phases that never begin.

    ``methods``: the methods of a run, ``together.Methods``.
    """
    if methods.whole.exchanges and known.weighted_by_key not in (None, NUM_EXAMPLES):
        yield Problem(
            "unknown-weights",
            f"weighted_by_key={known.weighted_by_key!r}: a synchronised step is"
            f" weighted by {NUM_EXAMPLES}, because the server must know the"
            " weights before the round",
            "weighted_by_key",
            remedy=f"weighted_by_key={NUM_EXAMPLES!r}",
        )
    for method in methods:
        for phase in method.declared_for(known.num_rounds):
            rounds, after = known.num_rounds, phase.after
            if rounds is None or after is None or after < rounds:
                continue
            setting = phase.after_setting
            key = setting.replace("_", "-")
            yield Problem(
                "phase-never-begins",
                f"{method.name}: with {key}={getattr(method.params, setting)}, the phase"
                f" begins after round {after} at the earliest, but the run has only"
                f" {rounds} rounds: the phase never begins, unless the run is resumed with"
                " more rounds",
                setting,
                effect="warn",
                remedy=f"a smaller {key} or more rounds",
            )


def problems_of_settings(methods: Any, known: Known) -> Iterator[Problem]:
    """Yield the problems of the settings that all methods share, and of the tests.

    ``methods``: the methods of a run, ``together.Methods``.
    """
    # tests that have no model under these methods
    local, tests = methods.local, known.tests or ()
    weights = local & {Part.AFFINE, Part.REST, Part.PERSONAL}
    if (methods.reestimates or RECALIBRATED in tests) and weights:
        # StaticBN re-estimates in every run, so the user can only change its personal
        # entries.
        asks = "recalibrate" if methods.params.recalibrate else "personal"
        key = "eval-on" if RECALIBRATED in tests else asks
        yield Problem(
            "no-global-weights",
            f"strategy {methods.name!r} keeps {' and '.join(sorted(weights))} with its"
            " clients, so there are no global weights to re-estimate statistics with"
            " (recalibrate, eval-on=recalibrated)",
            key.replace("-", "_"),
            stage="settings",
            remedy=f"a method that shares all weights (silobn), or leave {key} out",
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

    # settings without effect
    chosen = methods.params.layers or (known.parts and known.parts.averaged)
    for method in methods:
        if chosen and method.whole.exchanges is not None:
            yield Problem(
                "all-layers",
                f"{method.title} measures the statistics of all BatchNorm layers"
                " together, and cannot act on some of them: leave out layers",
                "layers",
                stage="settings",
            )
    if not acts_on_batchnorm(methods.whole):
        why = f"{methods.name} treats BatchNorm like all other layers"
        yield Problem("no-layers", why, "layers", "settings", "no-effect")
    if tests and not any(test.startswith("personal") for test in tests):
        why = "no client tests its model: set eval-on=personal-own"
        keys = "fine_tune eval_on"
        yield Problem("no-client-tests", why, keys, "settings", "no-effect")
    if Part.STATISTICS in local and SHARED_BN not in tests:
        why = f"{methods.name} averages no running variances"
        yield Problem("no-variances", why, "variance", "settings", "no-effect")
