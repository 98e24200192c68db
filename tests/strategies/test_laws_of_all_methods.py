"""Laws of every method: the round of a message, the reason of a run that ends, and a
checkpoint with all that a later round reads.

tests/reference compares second runs and resumed runs of every method.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor, nn

from fedbn_flwr.batchnorm.array_types import Array
from fedbn_flwr.errors import NothingTrainedError
from fedbn_flwr.server.runs.round_report import RoundReport
from fedbn_flwr.server.runs.run_state import Round
from fedbn_flwr.server.runs.run_state import Run as ServersRun
from fedbn_flwr.strategies import STRATEGIES, FedAvg, combined
from tests.support.bad_replies import spoil_state, spoiling
from tests.support.checkpoints import bits, through_a_file
from tests.support.fast import fast
from tests.support.federation import ALONE, Outcome
from tests.support.many_layers import SETTINGS, two_layers
from tests.support.seeds import with_seed

SIZES = (6, 13, 9)
ALL = fast([*STRATEGIES, "recalibrate"], "fedavg", "scaffold", "feddna", "recalibrate")
"""One case of each kind of message is fast."""


def made(case: str) -> FedAvg[Any]:
    if case == "recalibrate":
        return FedAvg(**ALONE, recalibrate=True, eval_every=2)
    return STRATEGIES[case](**ALONE, **SETTINGS.get(case, {}))


@pytest.fixture
def run_case(federate, datasets, wsconv_net) -> Callable[..., Outcome]:
    """Return a function that runs three rounds of a case's strategy."""

    def run(case: str, strategy: FedAvg[Any], **options: Any) -> Outcome:
        model = wsconv_net if case == "fedwon" else two_layers
        return federate(strategy, model, datasets, rounds=3, **options)

    return run


@pytest.mark.parametrize("case", ALL)
def test_every_message_has_its_round_in_the_config(case: str, run_case) -> None:
    """Flower's own messages have this key, and a mod may read it.

    Client 2 joins late.
    """
    strategy = made(case)
    strategy.configrecord_key = "settings"
    run = run_case(case, strategy, hide={1: {2}, 2: {2}})
    rounds = [m.content["settings"]["server-round"] for m in run.grid.sent]
    assert rounds == sorted(rounds)
    assert {*rounds} == {1, 2, 3}
    asked = run.grid.of("query")
    assert [m.content["settings"]["server-round"] for m in asked] == [1, 1, 3]


@pytest.mark.parametrize("case", ALL)
def test_a_run_whose_replies_were_all_refused_ends_with_the_reason(
    case: str, run_case
) -> None:
    """A method may end the run because nothing changed, but gives this reason."""

    def spoil(content: RecordDict) -> None:
        content["metrics"]["num-examples"] = -1

    bad = spoiling(spoil, who=range(3))
    run = run_case(case, made(case), wrap=bad, barrier=True, fails=NothingTrainedError)
    refused = sum(report.asked for report in run.reports)
    assert f"refused or lost: {refused} x 'num-examples' is -1" in str(run.error)


class Experts(nn.Module):
    """A net that trains one of two experts with each batch.

    With ``zero``, the other expert has a gradient of 0 instead of None.
    """

    @with_seed()
    def __init__(self, make: Callable[[], nn.Module], zero: bool) -> None:
        super().__init__()
        self.zero = zero
        self.experts = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)]).double()
        self.net = make()

    def forward(self, x: Tensor) -> Tensor:
        used = int(x.mean() > 1)
        y = self.experts[used](x)
        if self.zero:
            y = y + 0.0 * self.experts[1 - used](x)
        return self.net(y)


@pytest.mark.parametrize("case", [*ALL, "momentum", "fedrep+scaffold"])
def test_a_parameter_that_is_not_in_the_loss_of_a_step_has_a_gradient_of_zero(
    case: str, federate, datasets, wsconv_net, same_bits
) -> None:
    """The exception is a client's own momentum, like torch's."""
    options = {**ALONE, **SETTINGS.get(case, {})}
    if "fedrep" in case:
        options["personal"] = "net.6"
    kinds = [STRATEGIES[name] for name in case.split("+") if name in STRATEGIES]
    kind, training = combined(*kinds) if kinds else FedAvg, {}
    if case == "momentum":
        options["momentum_scope"], training = "global", {"sgd_momentum": 0.8}
    if case == "recalibrate":
        options["recalibrate"] = True
    ends = []
    for zero in (False, True):
        net = wsconv_net if case == "fedwon" else two_layers
        model = functools.partial(Experts, net, zero)
        run = federate(kind(**options), model, datasets, rounds=3, **training)
        ends.append(run.state)
    same_bits(*ends)


# The fields of a run and of its earlier reports that a later round reads but a
# checkpoint does not contain, with the reason.
NOT_SAVED = {
    **dict.fromkeys(("methods", "protection"), "given to the start"),
    "start": "of this start",
    "nodes": "they are asked again; the labels of the initialised ones are saved",
    "reports": "of this start: below is what is read of them",
    "round": "its fields are below as well",
}
NOT_SAVED_OF_REPORTS = {
    "diverged": (
        "a diverged run can be continued on purpose; the log then names the remedies"
        " once more"
    ),
    "kept_previous": (
        "whether what is known of the statistics holds: if not, they are not saved"
    ),
    "phase": "a line of the log, where the next phase begins",
    "rejected": "see server_round",
    "server_round": (
        "several nodes must agree before a series of non-finite replies ends a run, and"
        " a resumed run counts only its own"
    ),
}


def test_a_checkpoint_has_what_a_later_round_reads_of_the_run(
    federate, datasets, monkeypatch
) -> None:
    """The checkpoint follows a round without a test or finite replies.

    The model was kept, and its statistics are known.
    """
    make = functools.partial(
        FedAvg, recalibrate=True, eval_every=2, on_divergence="continue"
    )
    strategy = make()
    of_run = {field.name for field in dataclasses.fields(ServersRun)}
    fields = of_run | {field.name for field in dataclasses.fields(Round)}
    of_report = {field.name for field in dataclasses.fields(RoundReport)}
    watched, read, written, read_of_reports = False, set[str](), set[str](), set[str]()
    kept = {}

    def get(run: ServersRun | Round, name: str) -> Any:
        if watched and name in fields - written:
            read.add(name)
        return object.__getattribute__(run, name)

    def put(run: ServersRun | Round, name: str, value: Any) -> None:
        if watched:
            written.add(name)
        object.__setattr__(run, name, value)

    def get_of_report(report: RoundReport, name: str) -> Any:
        get_own = functools.partial(object.__getattribute__, report)
        if watched and name in of_report and get_own("server_round") == 3:
            read_of_reports.add(name)
        return get_own(name)

    def end_round(server_round: int, arrays: ArrayRecord, _: Any) -> None:
        nonlocal watched
        watched = False
        if server_round == 3:
            kept.update(
                arrays=arrays,
                state=through_a_file(strategy.state_dict()),
                run=values(strategy),
            )
            watched = True

    def values(of: FedAvg[Any]) -> dict[str, Any]:
        run = of.run
        found = {
            name: getattr(run if name in of_run else run.round, name)
            for name in fields - {"kept", "states"}
        }
        return bits(
            {**found, "kept": run.kept.saved(), "states": run.methods.saved(run.states)}
        )

    for kind in (ServersRun, Round):
        monkeypatch.setattr(kind, "__getattribute__", get)
        monkeypatch.setattr(kind, "__setattr__", put)
    monkeypatch.setattr(RoundReport, "__getattribute__", get_of_report)
    strategy.on_round_end = end_round
    app = spoiling(spoil_state(all_nan), who={0, 1, 2}, rounds={3, 4})
    federate(strategy, two_layers, datasets, rounds=4, wrap=app)
    assert strategy.run.not_finite_since == 3, "round 4 has read it"

    again = make(parts=strategy.parts)
    again.load_state_dict(kept["state"], 3)
    again.prepare(kept["arrays"], 4, 60.0)
    resumed = values(again)
    assert read >= NOT_SAVED.keys(), "a field that is never read needs no reason"
    saved = read - NOT_SAVED.keys()
    assert [name for name in saved if resumed[name] != kept["run"][name]] == []
    assert read_of_reports == NOT_SAVED_OF_REPORTS.keys()


def all_nan(state: dict[str, Array]) -> None:
    for name, value in state.items():
        if value.dtype.kind == "f":
            state[name] = value * float("nan")
