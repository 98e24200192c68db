"""Declarations determine phases, sent entries and the needs of a model."""

from contextlib import nullcontext
from typing import Any

import pytest

from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.server.methods.method import Ask, Method, reads_undeclared
from fedbn_flwr.server.methods.options import OPTIONS
from fedbn_flwr.server.methods.params import Params
from fedbn_flwr.server.methods.phases import (
    TRACKED,
    Extra,
    Phase,
    sums_suffice,
    together,
)
from fedbn_flwr.server.methods.together import Methods
from fedbn_flwr.server.runs.protection import disclosures
from fedbn_flwr.strategies import METHODS, STRATEGIES, Strategy, combined
from fedbn_flwr.transport.step_transport import LinkSettings

SIZES = (8, 12)


def test_beside_a_method_of_which_nothing_travels_all_of_a_method_travels() -> None:
    one = Phase(
        local=frozenset({Part.AFFINE}),
        frozen=TRACKED,
        each=frozenset({Part.REST}),
        weights="metric",
        extras=(
            Extra("moments", "moments", "why"),
            Extra("metric", "scalar", "why", required=True),
        ),
        exchanges=LinkSettings(),
        reestimates=True,
        undo=True,
        decides=frozenset({"gradients"}),
        needs=(frozenset({Part.AFFINE}),),
        keeps="a variate",
    )
    for pair in ([one, Phase()], [Phase(), one], [one, one]):
        assert together(pair) == one


def methods_of(*phases: Phase) -> Methods:
    fields = {"name": "mine", "phases": lambda self: phases}
    return Methods((type("Mine", (Method,), fields),), Params())


def metric_that(read: Any) -> Phase:
    key = "metric"
    extra = Extra(key, "scalar", "a metric", read=read, instead="no metric")
    return Phase(extras=(extra,))


@pytest.mark.parametrize(
    ("phase", "told"),
    [
        (Phase(exchanges=LinkSettings()), 1),
        (Phase(reestimates=True), 1),
        (Phase(each=TRACKED), 1),
        (metric_that("each"), 1),
        (metric_that("log"), 0),
    ],
)
def test_privacy_hears_of_all_that_is_read_beside_the_update(
    phase: Phase, told: int
) -> None:
    found = [one.instead for one in disclosures(methods_of(phase))]
    assert found == [phase.extras[0].instead if phase.extras else Method.instead] * told
    # Re-estimated statistics are sums of their own.
    assert sums_suffice(phase) == (phase.reestimates or not told)


@pytest.mark.parametrize(("held", "freezes"), [(frozenset(), True), (TRACKED, False)])
def test_what_is_held_from_the_first_phase_on_does_not_freeze_in_the_run(
    held: frozenset[Part], freezes: bool
) -> None:
    phases = Phase("a", frozen=held), Phase("b", frozen=TRACKED)
    assert methods_of(*phases).freezes_bn is freezes


class OnlyUp(Method):
    """A method with a record that only clients send, and an undeclared record."""

    name = "only-up"
    undeclared = False

    def phases(self) -> tuple[Phase, ...]:
        return (Phase(extras=(Extra(SENT, "trainable", "tells all", read="log"),)),)

    def on_clients(self, state: None, facts: Any) -> list[Ask]:
        return [
            Ask("nothing", {}, {"other": {}} if self.undeclared else {}, unnamed=True)
        ]


SENT = "tests.sent"


def test_a_record_that_only_clients_send_is_asked_for_counted_once_and_refused_by_privacy(
    mlp,
) -> None:
    class Mine(Strategy):
        method = OnlyUp

    strategy = Mine()
    # Arrays reveal data even if they are only reported.
    assert [one.text for one in disclosures(strategy.methods)] == ["tells all"]
    run = strategy.run
    run.set_model(to_record(mlp().state_dict()))
    assert [record.key for record in run.facts(1).phase.records] == [SENT]


def test_a_record_that_is_sent_and_not_declared_is_refused_by_name(
    federate_mlp,
) -> None:
    class Forgetful(OnlyUp):
        undeclared = True

    class Mine(Strategy):
        method = Forgetful

    with pytest.raises(ConfigError, match=r"'nothing' sends record 'other'.*phases"):
        federate_mlp(Mine(), rounds=1)


@pytest.mark.parametrize("each", [frozenset(), frozenset({Part.REST, Part.AFFINE})])
@pytest.mark.parametrize(
    "read",
    [
        lambda state: [state[name] for name in state],
        lambda state: [state.get(name) for name in state],
        lambda state: [*dict(state).values()],
        lambda state: [array for _, array in state.items()],
    ],
)
def test_an_entry_that_a_method_reads_is_there_or_each_is_named(
    federate_mlp, read, each
) -> None:
    class Reads(Method):
        name = "reads"

        def phases(self) -> tuple[Phase, ...]:
            return (Phase(each=each),)

        def aggregate(self, state, facts, replies, model):
            for reply in replies:
                arrays = read(reply.state)
                assert [a.shape for a in arrays] == [a.shape for a in model.values()]
            return model, state

    class Mine(Strategy):
        method = Reads

    refused = nullcontext() if each else pytest.raises(ConfigError, match="each= of a")
    with refused:
        federate_mlp(Mine(), rounds=1)


@pytest.mark.parametrize("first", [None, 0])
def test_a_state_that_is_no_dataclass_is_saved_and_restored(first: int | None) -> None:
    class Counts(Method):
        name = "counts"

        def begin(self, facts):
            return first

    methods = Methods([Counts], Params())
    saved = methods.saved({"counts": 7})
    assert methods.restored({"counts": first}, saved) == {"counts": 7}


def test_every_method_of_the_package_says_what_it_reads() -> None:
    """Otherwise, privacy would ask a user to change a class of the package."""
    for kind in (*METHODS.values(), *OPTIONS):
        assert not reads_undeclared(kind), kind.name


def test_the_state_of_a_strategy_is_there_before_a_run_too() -> None:
    """Flower's own loop calls ``evaluate_fn`` before the first ``configure_train``."""
    assert STRATEGIES["fixbn"]().state.frozen_after is None
    fedbs = STRATEGIES["fedbs"]().state
    assert (fedbs.switched_after, fedbs.agreed) == (None, 0)
    both = combined(STRATEGIES["fixbn"], STRATEGIES["scaffold"])().state
    assert (both["fixbn"].frozen_after, both["scaffold"].variates) == (None, {})
    scoped = STRATEGIES["fedavg"](momentum_scope="global")
    assert scoped.run.states["momentum-scope"].momentum == {}
    assert scoped.state is None
