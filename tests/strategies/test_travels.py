"""Declarations determine phases, sent entries and the needs of a model."""

import dataclasses
from typing import Any

import pytest

from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.server.methods.check_protections import disclosures
from fedbn_flwr.server.methods.method import Ask, Method, reads_undeclared
from fedbn_flwr.server.methods.options import OPTIONS
from fedbn_flwr.server.methods.params import Params
from fedbn_flwr.server.methods.together import Methods
from fedbn_flwr.server.methods.travels import (
    TRACKED,
    Exchanges,
    Extra,
    Travels,
    in_parallel,
    model_needs,
    together,
)
from fedbn_flwr.server.rounds.training import terms_of
from fedbn_flwr.strategies import METHODS, STRATEGIES, Strategy, combined


def test_phases_of_two_methods_run_in_parallel() -> None:
    first = [Travels("a", last=3), Travels("b", last=5), Travels("c")]
    second = [Travels("x", last=5, weights="equal"), Travels("y")]
    phases = [
        (one.phase, one.last, one.weights) for one in in_parallel([first, second])
    ]
    assert phases == [("x", 3, "equal"), ("x", 5, "equal"), ("y", None, "examples")]


def test_beside_a_method_of_which_nothing_travels_all_of_a_method_travels() -> None:
    moments, metric = (
        "moments",
        "metric",
    )
    one = Travels(
        local=frozenset({Part.AFFINE}),
        frozen=TRACKED,
        each=frozenset({Part.REST}),
        weights=metric,
        extras=(
            Extra(moments, "moments", "why"),
            Extra(metric, "scalar", "why", required=True),
        ),
        exchanges=Exchanges((1, 3)),
        reestimates=True,
        undo=True,
        decides=frozenset({"gradients"}),
        needs=(frozenset({Part.AFFINE}),),
        kept="a variate",
    )
    assert (
        together([one, Travels()])
        == together([Travels(), one])
        == together([one, one])
        == one
    )


def test_needs_are_told_in_the_order_of_the_layer_to_its_entries() -> None:
    statistics, affine = frozenset({Part.STATISTICS}), frozenset({Part.AFFINE})
    assert model_needs(Travels(frozen=TRACKED, needs=(affine,))) == [
        frozenset(),
        statistics,
        affine,
    ]


def methods_of(*phases: Travels) -> Methods:
    fields = {"name": "mine", "travels": lambda self, num_rounds=None: phases}
    return Methods((type("Mine", (Method,), fields),), Params())


def metric_that(read: Any) -> Travels:
    key = "metric"
    return Travels(extras=(Extra(key, "scalar", "a metric", read=read),))


@pytest.mark.parametrize(
    ("travels", "told"),
    [
        (Travels(exchanges=Exchanges((1, 3))), 1),
        (Travels(reestimates=True), 1),
        (Travels(each=TRACKED), 1),
        (metric_that("each"), 1),
        (metric_that("log"), 0),
    ],
)
def test_privacy_hears_of_all_that_is_read_beside_the_update(
    travels: Travels, told: int
) -> None:
    assert len(disclosures(methods_of(travels))) == told


@pytest.mark.parametrize(("held", "freezes"), [(frozenset(), True), (TRACKED, False)])
def test_what_is_held_from_the_first_phase_on_does_not_freeze_in_the_run(
    held: frozenset[Part], freezes: bool
) -> None:
    phases = Travels("a", last=1, frozen=held), Travels("b", frozen=TRACKED)
    assert methods_of(*phases).freezes_bn is freezes


class Early(Method):
    name = "early"

    def travels(self, num_rounds: int | None = None) -> tuple[Travels, ...]:
        return Travels("a", last=1, undo=True), Travels("b")

    def phase(self, state: None, number: int) -> str:
        return "a" if number == 1 else "b"


class Late(Early):
    name = "late"

    def travels(self, num_rounds: int | None = None) -> tuple[Travels, ...]:
        return Travels("x", last=2, weights="equal"), Travels("y")

    def phase(self, state: None, number: int) -> str:
        return "x" if number <= 2 else "y"


def test_a_round_has_the_phase_that_was_foretold() -> None:
    methods = Methods((Early, Late), Params())
    states = {"early": None, "late": None}
    for number, foretold in enumerate(methods.phases(3), start=1):
        phase = methods.phase(states, number)
        assert dataclasses.replace(phase, last=foretold.last) == foretold


def test_two_ends_that_are_found_out_in_the_run_are_refused() -> None:
    with pytest.raises(ConfigError):
        in_parallel(
            [[Travels("a"), Travels("b")], [Travels("x", last=2), Travels("y")]]
        )


class OnlyUp(Method):
    """A method with a record that only clients send, and an undeclared record."""

    name = "only-up"
    undeclared = False

    def travels(self, num_rounds: int | None = None) -> tuple[Travels, ...]:
        return (Travels(extras=(Extra(SENT, "trainable", "tells all", read="log"),)),)

    def on_clients(self, state: None, facts: Any) -> list[Ask]:
        return [
            Ask("nothing", {}, {"other": {}} if self.undeclared else {}, shown=True)
        ]


SENT = "tests.sent"


def test_a_record_that_only_clients_send_is_asked_for_counted_once_and_refused_by_privacy(
    mlp,
) -> None:
    class Mine(Strategy):
        method = OnlyUp

    strategy = Mine()
    assert strategy.methods.whole.extra_copies == (0, 1)
    assert [one.text for one in disclosures(strategy.methods)] == ["tells all"], (
        "arrays reveal data even if they are only reported"
    )
    run = strategy.run
    run.set_model(to_record(mlp().state_dict()))
    asks = strategy.methods.on_clients({"only-up": None}, run.facts(1))
    assert terms_of(run, run.facts(1), asks).extras == {SENT}


def test_a_record_that_is_sent_and_not_declared_is_refused_by_name(
    federate, mlp, points
) -> None:
    class Forgetful(OnlyUp):
        undeclared = True

    class Mine(Strategy):
        method = Forgetful

    with pytest.raises(ConfigError, match=r"'nothing' sends record 'other'.*travels"):
        federate(Mine(), mlp, [points(8), points(12, 1)], rounds=1)


@pytest.mark.parametrize("first", [None, 0])
def test_a_state_that_is_no_dataclass_is_saved_and_restored(first: int | None) -> None:
    class Counts(Method):
        name = "counts"

        def begin(self, facts: Any) -> Any:
            return first

    methods = Methods([Counts], Params())
    saved = methods.saved({"counts": 7})
    assert methods.restored({"counts": first}, saved) == {"counts": 7}


def test_every_method_of_the_package_says_what_it_reads() -> None:
    """Otherwise, privacy would ask a user to change a class of the package."""
    assert [
        kind.name for kind in (*METHODS.values(), *OPTIONS) if reads_undeclared(kind)
    ] == []


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
