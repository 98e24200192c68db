"""The package against one slow federation in plain torch.

The draws cross methods, models, clients, training and ways to run.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import Phase, assume, given, settings

from fedbn_flwr.server.methods.params import Params
from fedbn_flwr.strategies import STRATEGIES
from tests.reference.compare import check
from tests.reference.draws import ALONE, TOGETHER, Case, cases, covering, crossing
from tests.reference.methods import REFERENCES
from tests.reference.package import SETTINGS
from tests.support.fast import fast

DRAWS = 5
"""Draws of each half, all different; ``make laws`` has any number of others."""
fixed = settings(
    max_examples=DRAWS,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
)


IN_THE_SUITE = 60
"""Cases of the suite: they have two thirds of the pairs, and most triples of kinds.

`make slow` checks each pair.
"""
HALVES = [pytest.param(i, marks=pytest.mark.xdist_group(f"ref-{i}")) for i in (0, 1)]
"""Halves of the cases, one for each core."""
equal: set[str] = set()


CROSSED = [
    pytest.param(case, marks=HALVES[number % 2].marks)
    for number, case in enumerate(crossing(8_000, IN_THE_SUITE))
]


@pytest.mark.parametrize("case", CROSSED, ids=repr)
def test_the_package_equals_the_reference(case: Case) -> None:
    """Every entry, dtype, shape, kept state, client's test and refusal is equal."""
    check(case)
    equal.add(repr(case))


@pytest.mark.slow
@pytest.mark.parametrize("half", HALVES)
def test_the_package_equals_the_reference_in_each_pair_of_settings(half: int) -> None:
    for case in covering(10_000)[half::2]:
        check(case)


@pytest.mark.parametrize("half", HALVES)
@fixed
@given(case=cases())
def test_the_package_equals_the_reference_in_random_draws(
    half: int, case: Case
) -> None:
    # Hypothesis repeats more than half of the cases.
    assume(repr(case) not in equal)
    check(case)
    equal.add(repr(case))


RARE = (
    Case(
        methods=("scaffold",),
        rounds=4,
        hidden=((3, 0),),
        min_replies=3,
        eval_every=2,
        again="resume",
        resumed_after=3,
    ),
    Case(rounds=3, eval_every=2, steps=0, batch_size=4),
    Case(steps=4, batch_size=4, sampling="without-replacement"),
    Case(
        rounds=4, recalibrate=True, eval_every=2, min_replies=3, hidden=((3, 1), (4, 1))
    ),
    Case(
        methods=("scaffold",),
        model="tied",
        rounds=5,
        hidden=((1, 2), (2, 1), (3, 0)),
        min_replies=2,
        faults=((4, 1, "nan"),),
    ),
    Case(methods=("scaffold",), way="two-optimizers", sizes=(6, 9, 12)),
    Case(
        methods=("fedprox",),
        model="frozen",
        way="two-optimizers",
        sizes=(6, 9, 12),
        momentum=0.9,
        momentum_scope="local",
        agc=0.05,
    ),
    Case(methods=("fedrep",), way="two-optimizers", sizes=(6, 9, 12), steps=3),
    Case(methods=("fixbn",), model="convolutions", way="around", layers=True),
    Case(methods=("silobn",), rounds=3, eval_on="averaged-bn", recalibrate=True),
    Case(
        methods=("fedbn",),
        min_replies=3,
        faults=((2, 1, "raise"),),
        eval_on="averaged-bn",
    ),
    Case(model="in-eval"),
    Case(methods=("feddna",), model="convolutions"),
    Case(methods=("fedrep",), faults=((1, 0, "raise"),), head_steps=2, again="resume"),
    Case(methods=("silobn",), fraction=0.5, recalibrate=True, way="command"),
    Case(methods=("fedbn",), hidden=((1, 0),), again="resume"),
    Case(methods=("fedbn",), way="loop", sizes=(6, 9, 12), again="second-run"),
    Case(methods=("scaffold",), way="loop", sizes=(6, 9, 12), again="second-run"),
    Case(methods=("ditto",), rounds=3, agc=0.05),
    Case(
        methods=("staticbn",),
        model="convolutions",
        rounds=3,
        min_replies=2,
        hidden=((2, 0),),
        layers=True,
        batch_size=4,
    ),
    Case(
        methods=("fixbn", "fedyogi"),
        model="convolutions",
        rounds=4,
        freeze_affine=True,
        layers=True,
    ),
    Case(methods=("mtfl", "fixbn"), rounds=4, freeze_affine=True),
    # A client forgets the state of an earlier start although it trains later.
    Case(
        methods=("fednova",),
        sizes=(4, 6),
        rounds=4,
        fraction=0.5,
        faults=((3, 1, "raise"),),
        personal="last-layer",
        again="resume",
        resumed_after=2,
    ),
    # Frozen local parameters have no buffers, so the clients forget the earlier
    # buffers.
    Case(
        methods=("mtfl", "fixbn", "fedadam", "fedprox"),
        model="parametrized",
        sizes=(6, 9, 12),
        batch_size=3,
        steps=3,
        sampling="without-replacement",
        momentum=0.9,
        momentum_scope="global",
        variance="pooled",
        freeze_affine=True,
        way="two-optimizers",
    ),
    Case(
        methods=("fedbn",),
        rounds=4,
        fraction=0.5,
        momentum=0.9,
        momentum_scope="global",
        eval_on="averaged-bn",
        variance="pooled",
    ),
    Case(
        methods=("mtfl",),
        rounds=4,
        fraction=0.5,
        momentum=0.9,
        momentum_scope="local",
        eval_on="averaged-bn",
        variance="pooled",
    ),
    Case(methods=("fedbs",), rounds=4, fraction=0.5),
    Case(
        methods=("fednova", "mtfl"),
        sizes=(8, 3, 7, 5),
        steps=0,
        batch_size=3,
        momentum=0.9,
    ),
    Case(
        rounds=4,
        recalibrate=True,
        min_replies=3,
        faults=((2, 0, "nan"),),
        hidden=((3, 1),),
    ),
    Case(
        methods=("scaffold", "fedbn"),
        rounds=4,
        min_replies=2,
        hidden=((1, 1), (1, 2), (3, 0)),
    ),
    # A client whose statistics are lost is asked again under the same weights.
    Case(
        rounds=3,
        recalibrate=True,
        min_replies=2,
        faults=((1, 0, "unmeasured"), (2, 1, "raise"), (2, 2, "nan")),
    ),
    # The layers that the method does not treat have pooled variances.
    *(
        Case(methods=methods, model="convolutions", layers=True, variance="pooled")
        for methods in (
            ("fixbn",),
            ("ditto", "mtfl"),
            ("fedbn",),
            ("silobn", "fednova"),
        )
    ),
    # Complex entries are kept, stepped and resumed.
    *(
        Case(methods=methods, model="complex", again="resume", agc=0.05)
        for methods in (("ditto", "fedadagrad"), ("scaffold", "fedbn"), ("fedyogi",))
    ),
    # A client keeps the head of the shared model, and a whole model of its own.
    Case(methods=("ditto",), personal="head", way="command"),
    # The reply before the checkpoint is lost, and the nodes are killed later.
    Case(
        methods=("fedbn",),
        rounds=4,
        faults=((2, 0, "lost"),),
        momentum=0.9,
        momentum_scope="local",
        again="resume",
        resumed_after=2,
        folder=True,
    ),
    # A mod fails after the training: memory and folders have the same state.
    Case(methods=("silobn",), rounds=3, faults=((2, 1, "fails"),), folder=True),
    # A model forgets its memory before it is tested after fine-tuning. A client with one
    # example cannot train, and tests the model that it got.
    Case(
        methods=("ditto", "scaffold"), model="remembers", sizes=(6, 1, 7), fine_tune=2
    ),
    # The tested models after a run have fixed entries between their own entries.
    Case(
        methods=("mtfl",),
        personal="last-layer",
        trains="norm.weight,head",
        fine_tune=2,
        way="command",
    ),
    # A fixed layer is in eval mode in an app's own pass over its data.
    Case(methods=("staticbn",), model="cumulative", trains="b,head", way="loop"),
    # In the second phase, no shared parameter trains, so the variates are empty.
    Case(
        methods=("fixbn", "scaffold", "fedrep"),
        decay="freeze",
        fine_tune=2,
        batch_size=3,
        trains="norm.weight,head",
        freeze_affine=True,
    ),
    # Clients take different numbers of steps, and tau does not count the head's steps.
    Case(methods=("fednova", "fedrep"), batch_size=3, steps=0),
    # A fault in a middle round of each way to run a client.
    Case(methods=("fedbn",), way="command", rounds=3, faults=((2, 1, "raise"),)),
    Case(methods=("fedbn",), way="legacy", rounds=3, faults=((2, 1, "raise"),)),
    Case(methods=("fedtan",), steps=1, rounds=3, faults=((2, 1, "raise"),)),
    Case(
        methods=("fednova", "fedtan"),
        way="loop",
        sizes=(6, 9, 12),
        steps=1,
        rounds=3,
        faults=((2, 1, "raise"),),
        transport="barrier",
    ),
    # A reply of a middle round is lost or not used, and alpha trains before tests.
    Case(
        methods=("hbn",),
        rounds=4,
        faults=((2, 0, "lost"),),
        batch_size=4,
        steps=0,
        fine_tune=2,
        statistics_warm_up=0,
        again="resume",
        resumed_after=2,
        folder=True,
    ),
    Case(
        methods=("hbn",),
        model="convolutions",
        sizes=(6, 1, 7),
        rounds=4,
        faults=((3, 0, "nan"),),
        batch_size=3,
        steps=0,
        personal="head",
        layers=True,
        fine_tune=2,
        way="own-loop",
    ),
    Case(
        methods=("scaffold", "fedbn"),
        model="buffers",
        built=True,
        way="own-loop",
        rounds=3,
        faults=((2, 1, "lost"),),
    ),
    # The statistics of round 2 are not of the weights that round 4 keeps.
    Case(
        rounds=4,
        recalibrate=True,
        eval_every=2,
        min_replies=3,
        faults=((4, 1, "raise"),),
        again="resume",
        resumed_after=3,
    ),
    Case(
        rounds=4,
        recalibrate=True,
        eval_every=2,
        min_replies=3,
        faults=((4, 1, "raise"),),
    ),
    # Non-finite fixed entries are refused by the server, and the client's state counts.
    Case(methods=("ditto",), faults=((1, 0, "nan"),), trains="norms,head"),
    # Each round asks one client, and all refuse.
    Case(methods=("fedrep",), fraction=0.5, steps=1),
    # The method does not treat the other layer, which stays fixed whole.
    Case(methods=("fedbn",), model="cumulative", trains="a,head", layers=True),
)
"""Crossings that few of the fixed draws have."""


@pytest.mark.parametrize(
    "case", fast(RARE, *range(0, 30, 2), *range(30, len(RARE))), ids=repr
)
def test_the_package_equals_the_reference_in_rare_crossings(case: Case) -> None:
    check(case)


def test_each_reference_is_of_a_strategy_and_drawn() -> None:
    drawn = {"fedavg", *itertools.chain(*TOGETHER), *ALONE}
    assert REFERENCES.keys() == drawn <= STRATEGIES.keys()


NOT_DRAWN = {
    "seed": "of the draw of clients; batches have the clients' own",
    "class_moments": "tests/server/test_class_moments.py",
    "train_only": "tests/strategies/test_train_only.py",
    "on_divergence": "tests/server/test_failures.py",
    "loss_key": "a metric of the user's",
    "fedtan_timeout": "tests/transport",
    "fedtan_bind": "an address",
    "fedtan_address": "an address",
    "fedtan_tls_dir": "a folder",
}
"""The settings that no draw has, each with the reason or the place of its law."""


def test_each_setting_is_drawn_or_has_a_reason() -> None:
    drawn = {field.name for field in dataclasses.fields(Case)}
    drawn |= {name for values in SETTINGS.values() for name in values}
    drawn |= {"fedtan_exchanges", "fedtan_transport", "freeze_window", "freeze_tau"}
    known = {*Params.model_fields}
    for name in REFERENCES:
        known |= {*STRATEGIES[name].Params.model_fields}
    assert known - drawn == {*NOT_DRAWN} - drawn
    assert NOT_DRAWN.keys() <= known
