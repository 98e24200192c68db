"""The methods of a run, used as one method.

The options of every method come first, then the methods in the order of the registry.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from fedbn_flwr.batchnorm.parts import Part, Parts
from fedbn_flwr.errors import ConfigError, NothingTrainedError
from fedbn_flwr.server.methods.method import (
    Ask,
    Facts,
    Method,
    Problem,
    Replies,
    Round,
    RunSettings,
)
from fedbn_flwr.server.methods.options import OPTIONS
from fedbn_flwr.server.methods.params import RECALIBRATED, Params, tests_in
from fedbn_flwr.server.methods.shared_bn import SHARED_BN
from fedbn_flwr.server.methods.travels import (
    ALL,
    TRACKED,
    PartSet,
    Travels,
    acts_on_batchnorm,
    in_common,
    in_parallel,
    model_needs,
    needs_all_layers,
    single_decisions,
    together,
)

__all__ = [
    "TOO_LARGE_STEPS",
    "Methods",
    "States",
    "declared",
    "reads_undeclared",
    "why_not_combined",
]

logger = logging.getLogger("flwr")

States = Mapping[str, Any]
"""The state of each method by its name; read-only."""

TOO_LARGE_STEPS = (
    "Likely cause: the training steps are too large for the model. In small runs a"
    " lower learning-rate (a tenth or less) helped, and for a deep model without"
    " normalisation also norm=batch."
)
_NEEDED = {Part.AFFINE: "gamma and beta", Part.STATISTICS: "running statistics"}
_WITHOUT = {
    Part.AFFINE: "affine=False",
    Part.STATISTICS: "track_running_stats=False",
}
_VALUE = "value"  # key in a checkpoint of a state that is not a dataclass
_NONE_FOUND_BY_NAME = (
    "no BatchNorm that is recognised by the names of its arrays (BatchNorm without"
    " running statistics is found only with parts=split_state(model))"
)


class Methods:
    """The methods of a run.

    Args:
        kinds: the classes of the methods, in the order of the registry.
        params: the settings of all of them.

    Attributes:
        params: the settings.
        tests: the tests of ``eval_on`` (``tests_in``).
        name: the name of the strategy.
    """

    def __init__(self, kinds: Sequence[type[Method[Any, Any]]], params: Any) -> None:
        self.params: Params | Any = params
        self.tests = tests_in(params.eval_on)
        self.name = "+".join(kind.name for kind in kinds)
        options = [kind for kind in OPTIONS if kind.chosen(params)]
        # Options act first: a method sees the model that they leave.
        self._methods: tuple[Method[Any, Any], ...] = tuple(
            kind(params) for kind in (*options, *kinds)
        )

    def __iter__(self) -> Iterator[Method[Any, Any]]:
        """Iterate over the options in use, then the methods."""
        return iter(self._methods)

    def phases(self, num_rounds: int | None = None) -> list[Travels]:
        """Return the declarations of a run's phases, in order."""
        return in_parallel([declared(method, num_rounds) for method in self._methods])

    @cached_property
    def whole(self) -> Travels:
        """The declarations of all phases of a run, merged into one."""
        return together(one for method in self._methods for one in declared(method))

    @property
    def local(self) -> PartSet:
        """The parts of the state that stay with the clients."""
        return self.whole.local

    @property
    def own_models(self) -> bool:
        """Whether each client has a model of its own."""
        return bool(self.local) or self.whole.second_model

    @property
    def freezes_bn(self) -> bool:
        """Whether a part of BN is frozen in a later phase, but not in the first."""
        for method in self._methods:
            phases = declared(method)
            if len(phases) > 1 and phases[-1].frozen and not phases[0].frozen:
                return True
        return False

    @property
    def reestimates(self) -> bool:
        """Whether every test and the final model use re-estimated statistics."""
        if self.params.recalibrate:
            return True
        # The option of eval-on=recalibrated affects only one test.
        own = [method for method in self._methods if method.role != "option"]
        return any(_reestimates(method) for method in own)

    @property
    def client_hooks(self) -> dict[str, Any]:
        """The factories of the client hooks by name."""
        hooks: dict[str, Any] = {}
        for method in self._methods:
            hooks |= method.client_hooks
        return hooks

    @property
    def reported_metrics(self) -> list[str]:
        """The keys of the metrics that clients send for the methods."""
        return [extra.key for extra in self.whole.extras if extra.size == "scalar"]

    # --- a run ------------------------------------------------------------------------

    @property
    def before_a_run(self) -> States:
        """The states before a run begins, for the methods that declare their class."""
        return {method.name: method.State() for method in self._methods if method.State}

    def begin(self, facts: Facts) -> States:
        """Return the states before the first round."""
        return {method.name: method.begin(facts) for method in self._methods}

    def phase(self, states: States, number: int) -> Travels:
        """Return the declaration of a round's phase, with the name of the phase."""
        name, declarations = "train", []
        for method in self._methods:
            own = method.phase(states[method.name], number)
            # A declaration without a name applies in every phase of its method.
            declarations += [one for one in declared(method) if one.phase in ("", own)]
            # The round takes the phase name of the last method that has one.
            name = own or name
        return dataclasses.replace(together(declarations), phase=name)

    def on_clients(self, states: States, facts: Facts) -> list[Ask]:
        """Return the client hooks of a round, in order.

        Raises:
            ConfigError, NothingTrainedError: a method cannot do this round.
        """
        asks: list[Ask] = []
        for method in self._methods:
            state = states[method.name]
            _report(method.found(Round("sending", facts.number, state, facts)))
            asks += method.on_clients(state, facts)
        return asks

    def tuning(self, states: States, facts: Facts) -> list[Ask]:
        """Return the client hooks of the training before a test of a round.

        Only options act on a second model, because no method changes its layers.
        """
        asks: list[Ask] = []
        for method in self._methods:
            if method.role == "option" or not self.whole.second_model:
                asks += method.on_clients(states[method.name], facts)
        return [ask for ask in asks if ask.tunes]

    def fold(
        self, states: States, facts: Facts, replies: Replies, model: dict[str, Any]
    ) -> tuple[dict[str, Any], States]:
        """Let each method in turn make the new model. Return it and the new states."""
        after = dict(states)
        for method in self._methods:
            state = after[method.name]
            _report(method.found(Round("replies", facts.number, state, facts, replies)))
            model, after[method.name] = method.aggregate(state, facts, replies, model)
        return model, after

    def advice(self, states: States, number: int) -> list[str]:
        """Return the causes and the remedies of a non-finite loss in this round."""
        known = [TOO_LARGE_STEPS]
        for method in self._methods:
            known = method.advice(states[method.name], number, known)
        return known

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
        # A state without fields may begin as None, which is not saved.
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

    # --- what does not fit ------------------------------------------------------------

    def problems(self, run: RunSettings) -> list[Problem]:
        """Return the settings that do not fit the run or have no effect in it."""
        problems = list(self._test_problems(run.tests or self.tests))
        problems += self._setting_problems(run)
        for method in self._methods:
            problems += _declared_problems(method, run)
            problems += method.problems(run)
        if run.parts is not None:
            # Standalone shares nothing with any model, and its texts state it.
            kept = run.parts.select(self.local)
            if kept and kept == run.parts.names and self.local != ALL:
                text = f"{self.name} keeps every entry with the clients"
                has, remedy = "none to share", "standalone, or fewer personal entries"
                problems.append(
                    Problem("nothing-shared", text, "model", "", has, remedy)
                )
            for method in self._methods:
                # A layer with personal entries is still a layer of the model.
                by_type = dataclasses.replace(run.parts, personal=())
                problems += _model_problems(method, by_type)
                problems += _personal_problems(method, run.parts)
        # FedTAN-II has FedTAN's rows as well: report each problem once.
        return list(dict.fromkeys(problems))

    def of_other_layers(self, parts: Parts) -> str:
        """Return how the methods treat other layers with running statistics.

        These are the layers that are not a torch BatchNorm.
        """
        whole = self.whole
        done = {
            "keep": Part.STATISTICS in self.local,
            "freeze": self.freezes_bn,
            "synchronise": whole.exchanges is not None,
            "measure": self.reestimates or bool(in_common(whole) & TRACKED),
        }
        left_out = [word for word, does in done.items() if does]
        if parts.by_names:
            does = "treats their entries as BatchNorm's, because of their names"
            not_done = "the clients, which find layers by type, do not {} them"
            left_out = [word for word in left_out if word != "keep"]
        else:
            rest = "keeps" if Part.REST in self.local else "averages"
            does = f"{rest} their statistics like weights"
            not_done = "does not {} them"
        if not left_out or Part.REST in self.local:
            return f"{self.name} {does}."
        return f"{self.name} {does}, and {not_done.format(' or '.join(left_out))}."

    def wrong_settings(self) -> list[str]:
        """Return the settings that are wrong in any run."""
        # No run is known yet: skip rows that compare with a run.
        lines = [problem.text for problem in self._test_problems(self.tests)]
        fields = type(self.params).model_fields
        for problem in self.problems(RunSettings(0, tests=self.tests)):
            if problem.kind != "unused" or problem.key not in fields:
                continue
            value = getattr(self.params, problem.key)
            if value != fields[problem.key].default:
                lines.append(f"{problem.key}={value!r} has no effect: {problem.text}")
        return lines

    def _setting_problems(self, run: RunSettings) -> Iterator[Problem]:
        """Yield the problems of settings that every method has."""
        chosen = bool(self.params.layers or (run.parts and run.parts.averaged))
        for method in self._methods:
            if chosen and needs_all_layers(together(declared(method))):
                yield Problem(
                    "all-layers",
                    f"{method.title} measures the statistics of all BatchNorm layers"
                    " together, and cannot act on some of them: leave out layers",
                )
        if not acts_on_batchnorm(self.whole):
            yield Problem(
                "no-layers",
                f"{self.name} treats BatchNorm like all other layers",
                "unused",
                "layers",
            )
        if Part.REST in self.local:
            text = f"with {self.name} the whole model stays with the client"
            yield Problem("all-personal", text, "unused", "personal")
        personal = [test for test in run.tests if test.startswith("personal")]
        if run.tests and not personal:
            text = "no client tests its model (eval-on=personal-own)"
            yield Problem("no-client-tests", text, "unused", "fine_tune")
        if Part.STATISTICS in self.local and SHARED_BN not in run.tests:
            yield Problem(
                "no-variances",
                f"{self.name} averages no running variances",
                "unused",
                "variance",
            )

    def _test_problems(self, tests: Sequence[str]) -> Iterator[Problem]:
        """Yield the tests that have no model under these methods."""
        local = self.local
        weights = local & {Part.AFFINE, Part.REST, Part.PERSONAL}
        if (self.reestimates or RECALIBRATED in tests) and weights:
            yield Problem(
                "no-global-weights",
                f"strategy {self.name!r} keeps {' and '.join(sorted(weights))} with its"
                " clients, so there are no global weights to re-estimate statistics"
                " with (recalibrate, eval-on=recalibrated).",
            )
        asked = [name for name in tests if name.startswith("global")]
        if Part.REST in local and asked:
            yield Problem(
                "no-global-model",
                f"eval-on={','.join(asked)} tests a global model, but strategy"
                f" {self.name!r} has none: its clients share nothing, so the test would"
                " measure the initial model. Use personal-own or personal-global.",
            )
        if SHARED_BN in tests and (not local - {Part.REST} or Part.REST in weights):
            yield Problem(
                "no-local-batchnorm",
                f"eval-on={SHARED_BN} completes a global model with the average of the"
                f" BN parts that clients keep, but strategy {self.name!r} has no such"
                " model. Use it with fedbn, silobn or mtfl.",
            )


def _report(problems: Iterable[Problem]) -> None:
    """Log the warnings of a round, and raise the problem that ends the run."""
    for problem in problems:
        if problem.kind == "nothing-trained":
            raise NothingTrainedError(problem.text)
        if problem.kind == "refuse":
            raise ConfigError(problem.text)
        logger.warning("%s", problem.text)


def _fields_of(saved: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Return METHOD.FIELD of each field of saved states."""
    names: set[str] = set()
    for method, fields in saved.items():
        names.update(f"{method}.{field}" for field in fields)
    return names


def _reestimates(method: Method[Any, Any]) -> bool:
    """Return whether a method re-estimates statistics in one of its phases."""
    return any(phase.reestimates for phase in declared(method))


def _declared_problems(method: Method[Any, Any], run: RunSettings) -> Iterator[Problem]:
    """Yield the problems that follow from a method's declaration."""
    # BN's momentum only moves running statistics, and here all of them are frozen.
    if all(phase.frozen & TRACKED for phase in declared(method)):
        for key in ("variance", "bn_momentum"):
            yield Problem(
                "untracked",
                f"{method.name} tracks no running variances in training",
                "unused",
                key,
            )
        if run.norm == "batch-renorm":
            text = (
                f"{method.name} tracks no statistics in training, but"
                " norm=batch-renorm corrects with them"
            )
            yield Problem("batch-renorm", text)
    if method.role != "option" and _reestimates(method):
        yield Problem(
            "always-re-estimated",
            f"{method.name} always re-estimates",
            "unused",
            "recalibrate",
        )


def _model_problems(method: Method[Any, Any], parts: Parts) -> Iterator[Problem]:
    """Yield the layers or entries that a method needs and the model lacks."""
    # Either no layer at all, or no layer with the parts on which the method acts.
    for wanted in model_needs(together(declared(method))):
        if not parts.layers:
            has = _NONE_FOUND_BY_NAME if parts.by_names else ""
            remedy = f"{method.instead}, or a model with BatchNorm"
            yield Problem(
                "no-batchnorm",
                f"{method.title} needs BatchNorm",
                "model",
                has=has,
                remedy=remedy,
            )
        elif wanted and not parts.select(wanted):
            named = [part for part in _NEEDED if part in wanted]
            words = " or ".join(_NEEDED[part] for part in named)
            reasons = ", ".join(_WITHOUT[part] for part in named)
            kind = f"BatchNorm with {words}"
            has = f"{parts.named_layers()} without ({reasons})"
            remedy = f"{method.instead}, or a model with {kind}"
            yield Problem(
                "batchnorm-lacks-entries",
                f"{method.title} needs {kind}",
                "model",
                has=has,
                remedy=remedy,
            )


def _personal_problems(method: Method[Any, Any], parts: Parts) -> Iterator[Problem]:
    """Yield the personal entries that a method needs in common."""
    common = in_common(together(declared(method)))
    # The method does not act on layers outside ``layers``.
    by_type = dataclasses.replace(parts, personal=()).part_of
    needed = [name for name in parts.personal if by_type[name] in common]
    if needed:
        named = ", ".join(dict.fromkeys(by_type[name] for name in needed))
        yield Problem(
            "personal-in-common",
            f"{method.title} needs the {named} of all clients in common",
            "model",
            has=f"'{needed[0]}' among its personal entries ({len(needed)} such)",
            remedy=f"{method.instead}, or leave them out of personal",
        )


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
    # The class nearer to ``kind`` decides. A class with both declares what it reads.
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
