"""Laws of every method and option.

A run leaves nothing behind, a checkpoint has all that a run needs, and no entry changes
its dtype or shape. Runs are compared to the bit by all messages of the server, by
models and reports, and by the strategy's state. Their model has entries of every type.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from fedbn_flwr.batchnorm.array_types import Array
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.client import client_app
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.errors import NothingTrainedError
from fedbn_flwr.messages.records import from_record, to_record, to_state, views
from fedbn_flwr.server.runs.round_outcome import RoundOutcome
from fedbn_flwr.server.runs.run_state import Round
from fedbn_flwr.server.runs.run_state import Run as ServersRun
from fedbn_flwr.strategies import STRATEGIES, FedAvg, combined
from fedbn_flwr.training import LearningRate, LocalTraining
from tests.support.bad_replies import spoil_state, spoiling
from tests.support.checkpoints import bits, through_a_file
from tests.support.fast import fast
from tests.support.federation import Outcome, RecordingBarrierGrid, torch_clients
from tests.support.many_layers import EveryType, two_layers

SIZES = (6, 13, 9)
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "fixbn": {"freeze_at": 2},
    "fedtan2": {"fedtan_rounds": 2},
    "fedbs": {"fedbs_eps": 1e9, "fedbs_rounds": 3},
    "fedavgm": {"server_momentum": 0.8},
}
AUTO = {"freeze_at": "auto", "freeze_window": 3, "freeze_tau": 1e9}
OPTIONS: Mapping[str, tuple[tuple[str, ...], Mapping[str, Any]]] = {
    "momentum local": (("fedavg",), {"momentum_scope": "local"}),
    "momentum global, fedbn": (("fedbn",), {"momentum_scope": "global"}),
    "recalibrate": (("fedavg",), {"recalibrate": True, "eval_every": 2}),
    "recalibrated test": (("silobn",), {"eval_on": "personal-own,recalibrated"}),
    "averaged-bn, fedbn": (
        ("fedbn",),
        {"eval_on": "averaged-bn", "variance": "pooled"},
    ),
    "personal+fedbn+scaffold": (("fedbn", "scaffold"), {"personal": "0,6"}),
    "fixbn auto": (("fixbn",), AUTO),
    "fixbn auto, frozen early": (("fixbn",), {**AUTO, "freeze_window": 2}),
    "fedbs, switched early": (("fedbs",), {"fedbs_rounds": 1}),
    "mtfl+fixbn+fedadam": (("mtfl", "fixbn", "fedadam"), {}),
}
# tests/reference draws second runs and resumed runs of every method. These cases have
# each kind of state.
KINDS = ("standalone", "staticbn", "fedbs", "fedavgm", "fedadam")
NAMES = [*KINDS, "ditto", "fedtan2", *OPTIONS]
CASES = fast(
    NAMES,
    *("momentum local", "recalibrated test", "personal+fedbn+scaffold"),
    *("fixbn auto", "fedbs, switched early", "mtfl+fixbn+fedadam"),
)
"""The fast cases have the options that the reference does not draw, or several."""
FEW = fast(NAMES, "fixbn auto", "mtfl+fixbn+fedadam")
ALL = fast([*STRATEGIES, "recalibrate"], "fedavg", "scaffold", "feddna", "recalibrate")
"""One case of each kind of message is fast."""
Absent = Mapping[int, Collection[int]]
"""The partitions that the server does not see, by round."""

# The start, the state that a resumed run expects, and the name of a barrier.
VOLATILE = (
    "fedbn-flwr.start-id",
    "fedbn-flwr.local-sha256",
    "fedbn-flwr.fedtan-barrier",
)
ALONE = {"min_available_nodes": 1, "min_train_nodes": 1, "min_evaluate_nodes": 1}


def made(case: str) -> FedAvg[Any]:
    methods, options = OPTIONS.get(case, ((case,), {}))
    settings = {
        key: value for name in methods for key, value in SETTINGS.get(name, {}).items()
    }
    return combined(*(STRATEGIES[name] for name in methods))(
        **{**ALONE, **settings, **options}
    )


@dataclass
class Run:
    """The outcome of a run that an observer sees."""

    sent: list[Any]
    history: list[Any]
    reports: list[Any]
    state: Any

    def after(self, server_round: int) -> Run:
        """Return the part of the run after a round."""
        sent = [
            message
            for message in self.sent
            if message[2]["server-round"] > server_round
        ]
        reports = [
            report for report in self.reports if report.server_round > server_round
        ]
        return Run(sent, self.history[server_round + 1 :], reports, self.state)

    def assert_same(self, other: Run) -> None:
        for one, two in zip(self.sent, other.sent, strict=True):
            assert one[:3] == two[:3]
            for name in {**one[3], **two[3]}:
                assert one[3][name] == two[3][name], (
                    f"{one[:2]}: record '{name}' of round {one[2]['server-round']}"
                )
        assert self.history == other.history
        assert self.reports == other.reports
        assert self.state == other.state


class Federation:
    """Three clients that serve one strategy after another.

    ``away`` names the missing clients.
    """

    def __init__(self, inner: InProcessGrid) -> None:
        self.grid = RecordingBarrierGrid(inner, self._hidden)
        self._strategy: FedAvg[Any]
        self._away: Absent = {}

    def start(
        self,
        strategy: FedAvg[Any],
        rounds: int,
        away: Absent,
        arrays: Mapping[str, Array] | None = None,
        stop_after: int | None = None,
    ) -> Run:
        """Run the rounds up to ``stop_after``."""
        self._strategy, self._away = strategy, away
        strategy.parts = split_state(EveryType())
        first, history = len(self.grid.sent), list[Any]()

        def test(server_round: int, tested: ArrayRecord) -> MetricRecord | None:
            history.append(bits(from_record(tested)))
            strategy.stopped = server_round == stop_after
            return None

        start = to_record(arrays or EveryType().state_dict())
        result = strategy.start(
            self.grid, start, num_rounds=rounds, timeout=60, evaluate_fn=test
        )
        returned = from_record(result.arrays)
        self._assert_types([history, *bits([returned, strategy.state_dict()])])
        sent = [
            self._read(m)
            for m in self.grid.sent[first:]
            if m.metadata.message_type != "query"
        ]
        # A start counts only the nodes that were lost since it began.
        reports = [replace(one, expected=0, missing=[]) for one in strategy.reports]
        return Run(sent, history, reports, bits(strategy.state_dict()))

    def _assert_types(self, found: Any) -> None:
        """Assert that each entry has the dtype and shape of the model's entry.

        Entries are in ``found``, in messages and with the clients.
        """
        model = bits(to_state(EveryType().state_dict()))
        contents = [m.content for m in (*self.grid.sent, *self.grid.received)]
        contents += [self.grid.inner.context(i).state for i in range(len(SIZES))]
        # A broadcast is one record in several messages.
        records = {id(one): one for c in contents for one in c.array_records.values()}
        left = [found, *(bits(views(record)) for record in records.values())]
        while left:
            value = left.pop()
            if isinstance(value, list):
                left += value
            elif isinstance(value, dict):
                left += value.values()
                for name in value.keys() & model.keys():
                    # A server step has lists of moments in float64.
                    if isinstance(value[name], tuple):
                        assert value[name][:2] == model[name][:2], name

    def _hidden(self) -> Collection[int]:
        return self._away.get(self._strategy.reports[-1].server_round, ())

    def _read(
        self, message: Message
    ) -> tuple[int, str, Mapping[str, Any], Mapping[str, Any]]:
        config = {
            k: v
            for record in message.content.config_records.values()
            for k, v in record.items()
        }
        known = {key: value for key, value in config.items() if key not in VOLATILE}
        arrays = {
            name: bits(from_record(record))
            for name, record in message.content.array_records.items()
        }
        return (
            self.grid.partition(message.metadata.dst_node_id),
            message.metadata.message_type,
            known,
            arrays,
        )


Open = Callable[[str], Any]


@pytest.fixture
def federation(datasets) -> Open:
    """Return a function that opens the clients of a case."""

    @contextmanager
    def opened(case: str) -> Iterator[Federation]:
        momentum = 0.9 if case.startswith("momentum") else 0.0
        training = LocalTraining(
            learning_rate=LearningRate(0.05),
            batch_size=4,
            local_steps=2,
            sgd_momentum=momentum,
        )
        with InProcessGrid(
            client_app(torch_clients(EveryType, datasets, training)), len(SIZES)
        ) as grid:
            yield Federation(grid)

    return opened


@pytest.mark.parametrize("case", FEW)
def test_a_second_start_equals_a_new_strategys_run(federation: Open, case: str) -> None:
    """One client is away at first, and another client in the second run."""
    rounds = 4 if "auto" in case else 3
    strategy, away = made(case), {1: {1}}
    with federation(case) as clients:
        clients.start(strategy, rounds, {1: {0}})
        again = clients.start(strategy, rounds, away)
    with federation(case) as new_clients:
        again.assert_same(new_clients.start(made(case), rounds, away))


@pytest.mark.parametrize("case", FEW)
def test_a_run_goes_on_from_its_checkpoint_in_the_same_bits(
    federation: Open, case: str
) -> None:
    """The state is copied through a file.

    After the checkpoint, client 2 joins, at first as the only client, and client 1 is
    gone. All clients have local state of an earlier run.
    """
    rounds, saved_after, away = 5, 2, {1: {2}, 2: {2}, 3: {0, 1}, 4: {1}, 5: {1}}
    with federation(case) as clients:
        whole = clients.start(made(case), rounds, away)
    strategy, again = made(case), made(case)
    kept: list[Mapping[str, Array]] = []
    saved: dict[str, Any] = {}
    aggregate = strategy.aggregate_train

    def keep_model(server_round: int, replies: Any) -> Any:
        found = aggregate(server_round, replies)
        kept.extend([from_record(found[0])] if found[0] is not None else [])
        return found

    def save(server_round: int, *_: Any) -> None:
        saved.update(state=through_a_file(strategy.state_dict()))

    strategy.aggregate_train, strategy.on_round_end = keep_model, save  # type: ignore[method-assign]
    with federation(case) as clients:
        clients.start(made(case), rounds, {}, stop_after=1)
        clients.start(strategy, rounds, away, stop_after=saved_after)
        again.load_state_dict(saved["state"], saved_after)
        rest = clients.start(again, rounds, away, arrays=kept[-1] if kept else None)
    whole.after(saved_after).assert_same(rest)


@pytest.fixture
def run_case(federate, datasets, wsconv_net) -> Callable[..., Outcome]:
    """Return a function that runs three rounds of a case's strategy."""

    def run(case: str, strategy: FedAvg[Any], **options: Any) -> Outcome:
        return federate(
            strategy,
            wsconv_net if case == "fedwon" else two_layers,
            datasets,
            sgd_momentum=0.9 if case.startswith("momentum") else 0.0,
            rounds=3,
            **options,
        )

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

    bad = functools.partial(spoiling, spoil, who=range(3))
    run = run_case(case, made(case), wrap=bad, barrier=True, fails=NothingTrainedError)
    refused = sum(report.asked for report in run.strategy.reports)
    assert f"refused or lost: {refused} x 'num-examples' is -1" in str(run.error)


# The fields of a run and of its earlier reports that a later round reads but a
# checkpoint does not contain, with the reason.
NOT_SAVED: Mapping[str, str] = {
    **dict.fromkeys(("methods", "protection"), "given to the start"),
    "start": "of this start",
    "nodes": "they are asked again; the labels of the initialised ones are saved",
    "reports": "of this start: below is what is read of them",
    "round": "its fields are below as well",
}
NOT_SAVED_OF_REPORTS: Mapping[str, str] = {
    "diverged": (
        "a diverged run can be continued on purpose; the log then names the remedies"
        " once more"
    ),
    "kept_previous": (
        "whether what is known of the statistics holds: if not, they are not saved"
    ),
    "phase": "a line of the log, where the next phase begins",
}


def test_a_checkpoint_has_what_a_later_round_reads_of_the_run(
    federate, datasets, monkeypatch
) -> None:
    """The checkpoint follows a round without a test or finite replies.

    The model was kept, and its statistics are known.
    """
    strategy = FedAvg(recalibrate=True, eval_every=2, on_divergence="continue")
    of_run = {field.name for field in dataclasses.fields(ServersRun)}
    fields = of_run | {field.name for field in dataclasses.fields(Round)}
    of_report = {field.name for field in dataclasses.fields(RoundOutcome)}
    watched, read, written, read_of_reports = False, set[str](), set[str](), set[str]()
    kept: dict[str, Any] = {}

    def get(run: ServersRun | Round, name: str) -> Any:
        if watched and name in fields - written:
            read.add(name)
        return object.__getattribute__(run, name)

    def put(run: ServersRun | Round, name: str, value: Any) -> None:
        if watched:
            written.add(name)
        object.__setattr__(run, name, value)

    def get_of_report(report: RoundOutcome, name: str) -> Any:
        if (
            watched
            and name in of_report
            and object.__getattribute__(report, "server_round") == 3
        ):
            read_of_reports.add(name)
        return object.__getattribute__(report, name)

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
    monkeypatch.setattr(RoundOutcome, "__getattribute__", get_of_report)
    strategy.on_round_end = end_round
    app = functools.partial(
        spoiling, spoil_state(all_nan), who={0, 1, 2}, rounds={3, 4}
    )
    federate(
        strategy,
        two_layers,
        datasets,
        rounds=4,
        wrap=app,
    )
    assert strategy.run.not_finite_since == 3, "round 4 has read it"

    again = FedAvg(
        recalibrate=True, eval_every=2, on_divergence="continue", parts=strategy.parts
    )
    again.load_state_dict(kept["state"], 3)
    again.prepare(kept["arrays"], 4, 60.0)
    resumed = values(again)
    assert NOT_SAVED.keys() - read == set(), (
        "a field that is never read needs no reason"
    )
    assert {
        name for name in read - NOT_SAVED.keys() if resumed[name] != kept["run"][name]
    } == set()
    assert read_of_reports == NOT_SAVED_OF_REPORTS.keys()


def all_nan(state: dict[str, Array]) -> None:
    state.update(
        {
            name: value * float("nan")
            for name, value in state.items()
            if value.dtype.kind == "f"
        }
    )
