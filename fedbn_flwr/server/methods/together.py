"""The methods of a run, used as one method.

The options of every method come first, then the methods in the order of the registry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from fedbn_flwr.batchnorm.parts import Parts
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.problems import (
    BEFORE_A_RUN,
    Known,
    Problem,
    Stage,
    found_problems,
    tell,
)
from fedbn_flwr.server.methods.check_models import problems_of_model
from fedbn_flwr.server.methods.check_settings import problems_of_settings
from fedbn_flwr.server.methods.method import (
    Ask,
    Facts,
    Method,
    Replies,
    Reply,
    declared,
    reestimates,
)
from fedbn_flwr.server.methods.options import chosen_options
from fedbn_flwr.server.methods.params import Params, tests_in
from fedbn_flwr.server.methods.travels import (
    PartSet,
    Travels,
    in_parallel,
    together,
)

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
    """

    def __init__(self, kinds: Sequence[type[Method[Any, Any]]], params: Any) -> None:
        self.params: Params | Any = params
        self.tests = tests_in(params.eval_on)
        self.name = "+".join(kind.name for kind in kinds)
        # Options come first, because a method must see the model that the options
        # leave.
        self._methods: tuple[Method[Any, Any], ...] = tuple(
            kind(params) for kind in (*chosen_options(params), *kinds)
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
        # Leave out options: eval-on=recalibrated is an option, and affects only one
        # test.
        own = [method for method in self._methods if method.role != "option"]
        return any(reestimates(method) for method in own)

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
        """The states before a run begins, for methods that declare a ``State``."""
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
            if method.role == "option" or not self.whole.second_model:
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
        return model, after

    def advice(self, states: States, number: int, parts: Parts | None) -> list[str]:
        """Return the causes and the remedies of a non-finite loss in this round."""
        told = [TOO_LARGE_STEPS]
        for method in self._methods:
            known = Known(number=number, state=states[method.name], parts=parts)
            for problem in found_problems(method.rows, method, known, ["diverged"]):
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
        ``Settings.told``.
        """
        known = dataclasses.replace(known, tests=known.tests or self.tests)
        found = [*self.params.problems(known), *problems_of_settings(self, known)]
        found += problems_of_model(self, known)
        found = [problem for problem in found if problem.stage in stages]
        for method in self._methods:
            found += found_problems(method.rows, method, known, stages)
        # FedTAN-II has FixBN's rows as well: return each problem once.
        return list(dict.fromkeys(found))


def _tell_in_round(
    stage: Stage,
    method: Method[Any, Any],
    state: Any,
    facts: Facts,
    replies: Sequence[Reply] = (),
) -> None:
    """Log the warnings of a round, and raise the problem that ends the run."""
    known = Known(number=facts.number, state=state, facts=facts, replies=replies)
    tell(found_problems(method.rows, method, known, [stage]))


def _fields_of(saved: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Return METHOD.FIELD of each field of saved states."""
    names: set[str] = set()
    for method, fields in saved.items():
        names.update(f"{method}.{field}" for field in fields)
    return names
