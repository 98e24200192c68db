"""The methods of a run, used as one method.

The options of every method come first, then the methods in the order of the registry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from fedbn_flwr.batchnorm.parts import Part, Parts, tied_apart
from fedbn_flwr.errors import ConfigError, NormLayerError
from fedbn_flwr.messages.protocol import NUM_EXAMPLES
from fedbn_flwr.problems import (
    BEFORE_A_RUN,
    Effect,
    Known,
    Problem,
    Stage,
    found_problems,
    raise_or_warn,
)
from fedbn_flwr.server.methods.method import (
    Ask,
    Facts,
    Method,
    Replies,
    Reply,
)
from fedbn_flwr.server.methods.options import OPTIONS
from fedbn_flwr.server.methods.params import RECALIBRATED, Params, tests_in
from fedbn_flwr.server.methods.phases import (
    ALL,
    TRACKED,
    Phase,
    acts_on_batchnorm,
    in_common,
    model_needs,
    together,
)
from fedbn_flwr.server.methods.shared_bn import SHARED_BN
from fedbn_flwr.training.settings import round_of

States = Mapping[str, Any]
"""The state of each method by its name; read-only."""

TOO_LARGE_STEPS = (
    "Likely cause: the training steps are too large for the model. In small runs a"
    " lower learning-rate (a tenth or less) helped, and for a deep model without"
    " normalisation also norm=batch. If the task is a regression, first scale the targets"
    " to about -1 to 1: the loss is a square, so targets such as 25 to 346 make large"
    " steps."
)
_VALUE = "value"  # key in a checkpoint of a state that is not a dataclass


class Methods:
    """The methods of a run.

    Args:
        kinds: the classes of the methods, in the order of the registry.
        params: the settings of all of them.

    Attributes:
        params: the settings.
        tests: the tests of ``eval_on`` (``tests_in``).
        name: the name of the strategy.
        all_phases: all phases of the run, merged into one.
        local: the parts of the state that stay with the clients.
        own_models: whether each client has a model of its own.
        own_weights: the parts with weights that stay with the clients.
        reestimates: whether tests and the final model use statistics that the server
            pools for the global weights.
        own_statistics: whether a client measures the statistics of its own model before
            each test.
        freezes_bn: whether a part of BN is frozen in a later phase, but not in the
            first.
    """

    def __init__(self, kinds: Sequence[type[Method[Any, Any]]], params: Any) -> None:
        self.params: Params | Any = params
        self.tests = tests_in(params.eval_on)
        self.name = "+".join(kind.name for kind in kinds)
        # Options come first, because a method must see the model that the options
        # leave.
        methods: list[Method[Any, Any]] = []
        for option in OPTIONS:
            asked = option.test in self.tests
            if not option.test:
                default = Params.model_fields[option.setting].default
                asked = getattr(params, option.setting) != default
            if asked:
                methods.append(option(params))
        methods += [kind(params) for kind in kinds]
        self._methods = tuple(methods)
        self.all_phases = together(method.all_phases for method in self._methods)
        self.local = self.all_phases.local
        self.own_models = bool(self.local) or self.all_phases.second_model
        self.own_weights = self.local & {Part.AFFINE, Part.REST, Part.PERSONAL}
        # Weights that stay with a client have statistics of the client's own data.
        self.own_statistics: bool = params.recalibrate and self.own_models
        self.reestimates: bool = params.recalibrate and not self.own_weights
        self.freezes_bn = False
        for method in self._methods:
            # Leave out options: eval-on=recalibrated is an option, and affects only one
            # test.
            if method.role != "option" and method.all_phases.reestimates:
                self.reestimates = True
            first, last = method.declared[0], method.declared[-1]
            if last.frozen and not first.frozen:
                self.freezes_bn = True

    def __iter__(self) -> Iterator[Method[Any, Any]]:
        """Iterate over the options in use, then the methods."""
        return iter(self._methods)

    @property
    def changes_before_tests(self) -> str:
        """How a client changes its model before each test, or ""."""
        steps, changes = self.params.fine_tune, list[str]()
        if steps:
            changes.append(f"{steps} steps of fine-tune")
        if self.own_statistics:
            changes.append("re-estimation of its BN statistics")
        return " and ".join(changes)

    @property
    def reported_metrics(self) -> list[str]:
        """The keys of the metrics that clients send for the methods."""
        return [extra.key for extra in self.all_phases.extras if extra.size == "scalar"]

    # --- a run ------------------------------------------------------------------------

    def phase(self, states: States, number: int) -> Phase:
        """Return the declaration of a round's phase, with the name of the phase."""
        name, declarations = "train", []
        for method in self._methods:
            own = method.phase_name(states[method.name], number)
            # A declaration without a name applies in every phase of its method.
            declarations += [one for one in method.declared if one.name in ("", own)]
            # The round takes the phase name of the last method that has one.
            name = own or name
        return dataclasses.replace(together(declarations), name=name)

    def on_clients(self, states: States, facts: Facts) -> list[Ask]:
        """Return the client hooks of a round, in order.

        Raises:
            ConfigError, NothingTrainedError: a method cannot do this round.
        """
        asks: list[Ask] = []
        for method in self._methods:
            state = states[method.name]
            _tell_in_round("sending", method, state, facts)
            asks += method.on_clients(state, facts)
        return asks

    def tuning(self, states: States, facts: Facts) -> list[Ask]:
        """Return the client hooks of the training before a test of a round.

        If clients have a second model, this model is trained and tested. Then only the
        hooks of options act, because methods do not change its layers.
        """
        asks: list[Ask] = []
        for method in self._methods:
            if method.role == "option" or not self.all_phases.second_model:
                asks += method.on_clients(states[method.name], facts)
        return [ask for ask in asks if ask.tunes]

    def fold(
        self, states: States, facts: Facts, replies: Replies, model: dict[str, Any]
    ) -> tuple[dict[str, Any], States]:
        """Let each method in turn change the model. Return model and new states."""
        after = dict(states)
        for method in self._methods:
            state = after[method.name]
            _tell_in_round("replies", method, state, facts, replies)
            model, after[method.name] = method.aggregate(state, facts, replies, model)
            for name, array in model.items():
                like = facts.before.get(name, array)
                if (array.dtype, array.shape) != (like.dtype, like.shape):
                    raise ConfigError(
                        f"{method.title} returned entry '{name}' as {array.dtype} of"
                        f" shape {array.shape}, but it is {like.dtype} of shape"
                        f" {like.shape}. Let a server step change only the"
                        " entries of facts.stepped."
                    )
        return model, after

    def advice(self, states: States, number: int, parts: Parts | None) -> list[str]:
        """Return the causes and the remedies of a non-finite loss in this round."""
        told = [TOO_LARGE_STEPS]
        for method in self._methods:
            known = Known(number=number, state=states[method.name], parts=parts)
            for problem in found_problems(method.checks, method, known, ["diverged"]):
                if problem.effect == "cause":
                    told[0] = problem.text
                else:
                    told.append(problem.text)
        return told

    def outcome(self, states: States, num_rounds: int) -> dict[str, Any]:
        """Return the methods' entries of the summary after ``num_rounds``, by key."""
        said: dict[str, Any] = {}
        for method in self._methods:
            said |= method.outcome(states[method.name], num_rounds)
        return said

    # --- a checkpoint -----------------------------------------------------------------

    def saved(self, states: States) -> dict[str, dict[str, Any]]:
        """Return the states as JSON values and arrays, by method and field."""
        saved: dict[str, dict[str, Any]] = {}
        for name, state in states.items():
            if dataclasses.is_dataclass(state):
                saved[name] = {
                    field.name: getattr(state, field.name)
                    for field in dataclasses.fields(state)
                }
            elif state is not None:
                saved[name] = {_VALUE: state}
        return saved

    def restored(
        self, states: States, saved: Mapping[str, Mapping[str, Any]]
    ) -> States:
        """Return the states from ``saved``, given ``states`` from ``begin``.

        Raises:
            ConfigError: the saved states belong to other methods.
        """
        needed = _fields_of(self.saved(states))
        found = _fields_of(saved)
        # A state without fields may begin as None, and None is not saved.
        for name, state in states.items():
            if state is None:
                found.discard(f"{name}.{_VALUE}")
        if needed != found:
            listed = ", ".join(sorted(found)) or "none"
            raise ConfigError(
                f"this state does not fit strategy {self.name!r}. Expected fields:"
                f" {', '.join(sorted(needed)) or 'none'}. Saved fields: {listed}."
            )
        after = dict(states)
        for name, fields in saved.items():
            if dataclasses.is_dataclass(states[name]):
                after[name] = dataclasses.replace(states[name], **fields)
            else:
                after[name] = fields[_VALUE]
        return after

    # --- problems ---------------------------------------------------------------------

    def problems(
        self, known: Known, stages: Collection[Stage] = BEFORE_A_RUN
    ) -> list[Problem]:
        """Return the problems of the methods at these stages.

        Each setting without effect is named, whether it is set or not; see
        ``Settings.without_unset``.
        """
        known = dataclasses.replace(known, tests=known.tests or self.tests)
        found: list[Problem] = []
        if "settings" in stages:
            found += self.params.unused()
            found += _problems_of_settings(self, known)
        if "run" in stages:
            found += _problems_of_run(self, known)
        if "model" in stages:
            found += _problems_of_model(self, known)
        for one in (self.params, *self._methods):
            found += found_problems(one.checks, one, known, stages)
        # FedTAN-II has FixBN's checks as well: return each problem once.
        return list(dict.fromkeys(found))

    def raise_or_warn(self, known: Known, stages: Collection[Stage]) -> None:
        """Raise the problems of the methods at these stages, or log the warnings."""
        raise_or_warn(self.params.without_unset(self.problems(known, stages)))


def _tell_in_round(
    stage: Stage,
    method: Method[Any, Any],
    state: Any,
    facts: Facts,
    replies: Sequence[Reply] = (),
) -> None:
    """Log the warnings of a round, and raise the problem that ends the run."""
    known = Known(number=facts.number, state=state, facts=facts, replies=replies)
    raise_or_warn(found_problems(method.checks, method, known, [stage]))


def _fields_of(saved: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Return METHOD.FIELD of each field of saved states."""
    names: set[str] = set()
    for method, fields in saved.items():
        names.update(f"{method}.{field}" for field in fields)
    return names


# --- the models, settings and tests that the methods refuse ------------------------------
#
# They follow from the declarations of the methods (``Phase``). If only one method has a
# need, the need is a check in the file of this method. A condition between two settings is
# ``only_if`` at the setting, in ``params``.

_NEEDED = {Part.AFFINE: "gamma and beta", Part.STATISTICS: "running statistics"}
_WITHOUT = {
    Part.AFFINE: "affine=False",
    Part.STATISTICS: "track_running_stats=False",
}
_NONE_FOUND_BY_NAME = (
    "no BatchNorm that is recognised by the names of its arrays, running_mean and"
    " num_batches_tracked (BatchNorm without them is found only with"
    " parts=split_state(model))"
)


def _problems_of_model(methods: Methods, known: Known) -> Iterator[Problem]:
    """Yield the problems that the methods have with the model."""
    parts = known.parts
    if parts is None:
        return
    # Standalone never shares an entry, as its documentation states, so it is allowed.
    local = parts.select(methods.local)
    stays = {*local, *parts.fixed}
    if local and stays == {*parts.names} and methods.local != ALL:
        yield _misfit(
            "nothing-shared",
            f"{methods.name} keeps every entry that trains with the clients, but"
            f" {known.model} has none to share",
            "standalone, or fewer personal entries, or more entries in train_only",
            "personal train_only",
        )
    # If the split follows from names, the clients find tied entries.
    yield from tied_apart(parts.tied, local)
    # Ignore the choice of personal entries: a layer with personal entries is still a
    # layer of the model.
    by_type = dataclasses.replace(parts, personal=())
    # Layers that do not train are left out of the split, but they may be BatchNorm.
    others = [] if known.untrained else parts.other_norms
    own_others = [] if known.untrained else by_type.other_norms
    tracked = parts.whole.select(TRACKED)
    trained = {*parts.names}.difference(parts.buffers, parts.fixed, tracked)
    for method in methods:
        if trained and trained.issubset(by_type.select(method.all_phases.frozen)):
            yield _misfit(
                "nothing-left-to-train",
                f"{method.title} freezes all {len(trained)} entries of {known.model}"
                " that train",
                f"{method.instead}, or more entries in train_only",
                "train_only",
            )
        if others and acts_on_batchnorm(method.all_phases):
            yield _other_norm(method, parts)
        # Either the model has no layer, or no layer has the parts that the method needs.
        for wanted in model_needs(method.all_phases):
            if not by_type.layers:
                # Personal norms of a library stay with the clients, as BatchNorm does.
                if others or (own_others and method.all_phases.local):
                    continue
                has = _NONE_FOUND_BY_NAME if parts.by_names else known.has
                for path in parts.types.get("FrozenBatchNorm2d", ())[:1]:
                    has = f"FrozenBatchNorm2d ({path}, ...), which is fixed"
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
        common = in_common(method.all_phases)
        needed = [name for name in parts.personal if by_type.part_of[name] in common]
        if needed:
            which = dict.fromkeys(by_type.part_of[name] for name in needed)
            yield _misfit(
                "personal-in-common",
                f"{method.title} needs the {', '.join(which)} of all clients in common,"
                f" but {known.model} has '{needed[0]}' among its personal entries"
                f" ({len(needed)} such)",
                f"{method.instead}, or leave them out of personal",
                "personal",
            )


def _other_norm(method: Method[Any, Any], parts: Parts) -> Problem:
    """Return the problem of layers with running statistics that are not BatchNorm."""
    path, *_ = paths = parts.other_norms
    kinds = [kind for kind in parts.types if path in parts.types[kind]]
    # The class of the layer has fewer layers than its base classes.
    kind = min(kinds, key=lambda kind: len(parts.types[kind]), default="by its names")
    text = (
        f"layer '{path}' ({kind}; {len(paths)} such) has"
        " running statistics, but is no BatchNorm of torch, and"
        f" {method.title} treats only BatchNorm. personal='{','.join(paths)}' keeps it with each client;"
        " parts=split_state(model) averages it, if its class is no BatchNorm of torch"
    )
    only = parts.by_names or not parts.whole.layers
    effect: Effect = "refuse" if only else "warn"
    return Problem("other-norm", text, "personal", "model", effect, "", NormLayerError)


def _misfit(code: str, text: str, remedy: str, keys: str = "strategy") -> Problem:
    """Return the problem of a model that does not fit."""
    return Problem(code, text, keys, stage="model", remedy=remedy, error=NormLayerError)


def _problems_of_run(methods: Methods, known: Known) -> Iterator[Problem]:
    """Yield the problems of the weights and of phases that never begin."""
    if methods.all_phases.exchanges and known.weighted_by_key not in (
        None,
        NUM_EXAMPLES,
    ):
        yield Problem(
            "unknown-weights",
            f"weighted_by_key={known.weighted_by_key!r}: a synchronised step is"
            f" weighted by {NUM_EXAMPLES}, because the server must know the"
            " weights before the round",
            "weighted_by_key",
            remedy=f"weighted_by_key={NUM_EXAMPLES!r}",
        )
    rounds = known.num_rounds
    for method in methods:
        for phase in method.declared:
            if rounds is None or not phase.after:
                continue
            at, key = getattr(method.params, phase.after), phase.after.replace("_", "-")
            after = round_of(at, rounds)
            if after is None or after < rounds:
                continue
            yield Problem(
                "phase-never-begins",
                f"{method.name}: with {key}={at}, the phase begins after round {after}"
                f" at the earliest, but the run has only {rounds} rounds: the"
                " phase never begins, unless the run is resumed with more rounds",
                phase.after,
                effect="warn",
                remedy=f"a smaller {key} or more rounds",
            )


def _problems_of_settings(methods: Methods, known: Known) -> Iterator[Problem]:
    """Yield the problems of the settings that all methods share, and of the tests."""
    # tests that have no model under these methods
    local, tests = methods.local, known.tests or ()
    weights = methods.own_weights
    if (methods.reestimates or RECALIBRATED in tests) and weights:
        # StaticBN re-estimates in every run, so the user can only change its personal
        # entries.
        key = "eval-on" if RECALIBRATED in tests else "personal"
        yield Problem(
            "no-global-weights",
            f"strategy {methods.name!r} keeps {' and '.join(sorted(weights))} with its"
            " clients, so there are no global weights to re-estimate statistics with"
            f" ({key})",
            key.replace("-", "_"),
            stage="settings",
            remedy=f"a method that shares all weights (silobn), or leave {key} out"
            " (recalibrate=true re-estimates the statistics of each client's own model)",
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
        if chosen and method.all_phases.exchanges is not None:
            yield Problem(
                "all-layers",
                f"{method.title} measures the statistics of all BatchNorm layers"
                " together, and cannot act on some of them: leave out layers",
                "layers",
                stage="settings",
            )
    if not acts_on_batchnorm(methods.all_phases):
        why = f"{methods.name} treats BatchNorm like all other layers"
        yield Problem("no-layers", why, "layers", "settings", "no-effect")
    if tests and not any(test.startswith("personal") for test in tests):
        why = "no client tests its model: set eval-on=personal-own"
        keys = "fine_tune eval_on"
        yield Problem("no-client-tests", why, keys, "settings", "no-effect")
    # Running variances are averaged in the layers that the method does not treat.
    if Part.STATISTICS in local and SHARED_BN not in tests and not chosen:
        why = f"{methods.name} averages no running variances"
        yield Problem("no-variances", why, "variance", "settings", "no-effect")
