"""A client with bad replies is named and left out, as if it were not there."""

from __future__ import annotations

import functools
import io
import random
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp

from fedbn_flwr.client import client_app
from fedbn_flwr.errors import (
    NOT_FINITE,
    STATISTICS_NOT_FINITE,
    ConfigError,
    DivergedError,
)
from fedbn_flwr.messages.records import to_record, to_state, views
from fedbn_flwr.server.methods.method import Node, far_from_others
from fedbn_flwr.server.methods.options import AveragedBN
from fedbn_flwr.server.methods.shared_bn import SHARED_BN
from fedbn_flwr.strategies import (
    MTFL,
    FedAvg,
    FedBN,
    FedNova,
    FedTAN,
    Scaffold,
    SiloBN,
    combined,
)
from fedbn_flwr.strategies.fednova import TAU
from fedbn_flwr.strategies.scaffold import VARIATES
from tests.support.bad_replies import (
    BAD,
    Spoil,
    spoil_state,
    spoiling,
)
from tests.support.points import Points
from tests.support.written_out import close

SIZES = (6, 13, 9)


def entry(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Spoil:
    return spoil_state(lambda state: state.update({name: change(state[name])}))


def put(value: float, index: int = 0) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array.flat[index] = value
        return array

    return change


def record(content: RecordDict, **entries: Array | None) -> None:
    """Put these arrays into the reply's state, or remove an entry if it is None."""
    changed = {**content["arrays"], **entries}
    content["arrays"] = ArrayRecord(
        {name: array for name, array in changed.items() if array is not None}
    )


def garbage(data: bytes, dtype: str = "float64") -> Spoil:
    return lambda content: record(
        content, **{"0.bias": Array(dtype, (4,), "numpy.ndarray", data)}
    )


def wrong_header(content: RecordDict) -> None:
    """Keep the array's data but spoil its description."""
    garbage(content["arrays"]["0.bias"].data, "nonsense")(content)


def count(value: float | None) -> Spoil:
    def spoil(content: RecordDict) -> None:
        numbers = {k: v for k, v in content["metrics"].items() if k != "num-examples"}
        content["metrics"] = MetricRecord(
            numbers if value is None else {**numbers, "num-examples": value}
        )

    return spoil


def metric(name: str, value: float) -> Spoil:
    def spoil(content: RecordDict) -> None:
        content["metrics"] = MetricRecord({**content["metrics"], name: value})

    return spoil


def fail(content: RecordDict) -> None:
    raise RuntimeError("disk full")


def no_arrays(content: RecordDict) -> None:
    del content["arrays"]


def two_metrics(content: RecordDict) -> None:
    content["more"] = MetricRecord({"num-examples": 3})


def object_array() -> bytes:
    out = io.BytesIO()
    np.save(out, np.asarray([{"a": 1}], dtype=object), allow_pickle=True)
    return out.getvalue()


HEADER = b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 's"
WRONG: dict[str, tuple[Spoil, str | None, str]] = {
    # The spoiled reply, the code of the refusal and the name in the refusal, by fault.
    "nan": (entry("0.weight", put(np.nan, 3)), NOT_FINITE, "'0.weight'"),
    "huge": (entry("0.weight", put(-1e31, 3)), NOT_FINITE, "contains -1e+31"),
    "grown": (
        entry("0.weight", lambda a: a * 1e7),
        NOT_FINITE,
        "'0.weight' has the norm",
    ),
    "inf": (
        entry("1.running_mean", put(-np.inf)),
        STATISTICS_NOT_FINITE,
        "'1.running_mean'",
    ),
    "shape": (entry("0.bias", lambda a: a[:2]), None, "'0.bias' has shape (2,)"),
    "dtype": (
        entry("0.bias", lambda a: a.astype(np.float32)),
        None,
        "'0.bias' has dtype float32",
    ),
    "missing": (lambda content: record(content, **{"3.bias": None}), None, "'3.bias'"),
    "extra": (lambda content: record(content, own=Array(np.zeros(1))), None, "'own'"),
    "variance": (
        entry("1.running_var", put(-0.5, 2)),
        None,
        "'1.running_var' has a negative variance",
    ),
    "zero": (count(0), None, "'num-examples' is 0"),
    "negative": (count(-3), None, "'num-examples' is -3"),
    "count nan": (count(float("nan")), None, "'num-examples' is nan"),
    "no count": (count(None), None, "'num-examples' is None"),
    "error": (fail, None, "disk full"),
    "no arrays": (no_arrays, None, "'arrays'"),
    "two metrics": (two_metrics, None, "2 MetricRecords"),
    "count of a set": (
        metric("own-num-examples", -5.0),
        None,
        "'own-num-examples' is -5.0",
    ),
    "name": (metric("\x1b[2Jloss", 1.0), None, r"the name '\x1b[2Jloss'"),
    "long name": (metric("n" * 300, 1.0), None, "a metric has the name 'nnn"),
    "counter": (
        entry("1.num_batches_tracked", lambda a: a + 10**15),
        None,
        "'1.num_batches_tracked' grew by 10000000000000",
    ),
    "largest counter": (
        entry("1.num_batches_tracked", lambda a: a * 0 + (2**63 - 1)),
        None,
        "'1.num_batches_tracked' grew by 9223372036854775",
    ),
    "many metrics": (
        lambda content: content["metrics"].update({f"m{i}": 1.0 for i in range(2000)}),
        None,
        "at most 1000 metrics",
    ),
    "long list": (
        lambda content: content["metrics"].update({"list": [1.0] * 200_000}),
        None,
        "100000 numbers",
    ),
    "text": (garbage(b"not an array"), None, "ValueError"),
    "empty": (garbage(b""), None, "EOFError"),
    "zip": (garbage(b"PK\x03\x04nonsense"), None, "BadZipFile"),
    "cut off": (garbage(HEADER), None, "ValueError"),
    "object": (garbage(object_array()), None, "ValueError"),
    "header": (wrong_header, None, "TypeError"),
}


@pytest.fixture
def without_bad(federate, points, mlp):
    """Return a run with a bad client that has no data."""
    if not WITHOUT:
        datasets = [points(6, 0), points(0), points(9, 2)]
        WITHOUT.append(federate(FedAvg(), mlp, datasets, rounds=1))
    return WITHOUT[0]


WITHOUT: list[Any] = []
VALUES = (np.nan, np.inf, 1e30, -3e38)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_bad_reply_is_refused_by_name(
    federate, datasets, mlp, without_bad, wrong: str
) -> None:
    spoil, code, name = WRONG[wrong]
    run = federate(
        FedAvg(), mlp, datasets, rounds=1, wrap=functools.partial(spoiling, spoil)
    )
    node_id = run.grid.get_node_ids()[BAD]
    (report,) = run.strategy.reports
    assert list(report.rejected) == [node_id]
    assert report.missing == [str(BAD)]
    assert report.rejected[node_id].startswith(f"node {node_id} (partition {BAD}): ")
    assert name in report.rejected[node_id]
    assert report.codes.get(node_id) == ({code} if code else None)
    assert (report.participants, report.kept_previous) == ([0, 2], False)
    assert list(report.clients) == ["0", "2"]
    close(run.state, without_bad.state)


def as_type(kind: str) -> Callable[[np.ndarray], np.ndarray]:
    return lambda array: array.astype(kind)


@pytest.mark.parametrize(
    ("record", "name", "change", "said"),
    [
        *(
            (VARIATES, "0.weight", put(value, 3), f" contains {value}")
            for value in VALUES
        ),
        *(
            (VARIATES, "0.weight", as_type(kind), f"{kind} of shape")
            for kind in ("complex64", "int64", "bool")
        ),
        # The first stays with the clients, and no gradient trains the second.
        (VARIATES, "1.weight", as_type("float64"), "float64 of shape"),
        (VARIATES, "1.running_var", as_type("float64"), "float64 of shape"),
        (
            SHARED_BN,
            "1.weight",
            lambda array: array[:2],
            f"use {AveragedBN.instead} if",
        ),
    ],
)
def test_a_record_of_the_method_that_is_not_usable_is_rejected_by_name(
    federate, datasets, mlp, record, name, change: Callable[[np.ndarray], Any], said
) -> None:
    def spoil(content: RecordDict) -> None:
        found = {n: array.copy() for n, array in views(content[record]).items()}
        found[name] = change(found.get(name, np.zeros(4)))
        content[record] = to_record(found)

    with_variates = combined(Scaffold, MTFL)()
    strategy = with_variates if record == VARIATES else FedBN(eval_on=SHARED_BN)
    wrap = functools.partial(spoiling, spoil)
    reason = federate(strategy, mlp, datasets, rounds=1, wrap=wrap).reason(BAD)
    assert f"(partition {BAD}): record '{record}': " in reason
    assert f"entry '{name}'" in reason
    assert said in reason


def test_a_node_of_unknown_batch_size_is_left_out_of_a_synchronised_step(
    federate, datasets, mlp
) -> None:
    wrap = functools.partial(spoiling, RecordDict.clear, kind=MessageType.QUERY)
    run = federate(FedTAN(), mlp, datasets, rounds=1, wrap=wrap)
    assert "the size of the first batch" in run.reason(BAD)
    assert run.strategy.reports[0].participants == [0, 2]


def variates(value: float) -> Spoil:
    def spoil(content: RecordDict) -> None:
        found = views(content[VARIATES])
        content[VARIATES] = to_record({n: a * 0 + value for n, a in found.items()})

    return spoil


def times(factor: float) -> Spoil:
    return spoil_state(
        lambda state: state.update(
            {n: state[n] * factor for n in ("0.weight", "3.weight")}
        )
    )


FAR: dict[str, tuple[Any, Spoil, str]] = {
    # The strategy, the spoiled reply, and the name in the refusal.
    **{
        f"tau {value:g}": (FedNova, metric(TAU, value), "'fednova-tau'")
        for value in (0.0, 1e12, 1e-12, -1.0, np.nan, np.inf)
    },
    **{
        f"variates {value:g}": (Scaffold, variates(value), f"'{VARIATES}'")
        for value in (1e4, -1e6, 1e8)
    },
}


@pytest.mark.parametrize("lie", FAR)
def test_a_value_that_no_client_can_have_leaves_the_node_out(
    federate, datasets, points, mlp, lie: str
) -> None:
    """The run equals the run without the node, from the round of the lie."""
    strategy, spoil, name = FAR[lie]
    others = [points(6, 0), points(0), points(9, 2)]
    wrap = functools.partial(spoiling, spoil)
    run = federate(strategy(), mlp, datasets, rounds=2, wrap=wrap)
    assert all(name in run.reason(BAD, number) for number in (1, 2))
    without = federate(strategy(), mlp, others, rounds=2)
    if strategy is FedNova:  # N of SCAFFOLD counts the node
        close(run.state, without.state)
    last = np.abs(run.state["0.weight"] - without.state["0.weight"]).max()
    assert last < 0.1, "c has no part of the lie"


@pytest.mark.parametrize("factor", [100.0, -300.0])
def test_weights_far_from_the_others_name_their_node(
    federate, datasets, mlp, caplog, factor: float
) -> None:
    wrap = functools.partial(spoiling, times(factor))
    run = federate(FedAvg(), mlp, datasets, rounds=1, wrap=wrap)
    (told,) = warnings_of(caplog, "the norm of its weights")
    assert told.startswith(f"node {run.grid.get_node_ids()[BAD]} (partition {BAD})")


LIES = {
    # The kind of message, the metric, and the lie.
    "training": (MessageType.TRAIN, "train-loss", np.nan),
    "infinite": (MessageType.TRAIN, "train-loss", -np.inf),
    "test": (MessageType.EVALUATE, "loss", np.nan),
    "shares": (MessageType.EVALUATE, "accuracy", 900.0),
    "negative": (MessageType.EVALUATE, "accuracy", -0.5),
    "loss": (MessageType.EVALUATE, "loss", -1e6),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_metric_out_of_its_range_is_left_out_of_the_mean(
    federate, datasets, mlp, caplog, lie: str
) -> None:
    """The run continues, and the mean is the mean of the other clients."""
    kind, name, value = LIES[lie]
    wrap = functools.partial(spoiling, metric(name, value), kind=kind)
    run = federate(FedAvg(), mlp, datasets, rounds=2, wrap=wrap)
    (told,) = warnings_of(caplog, f"'{name}' is {value:g}")
    assert told.startswith(f"node {run.grid.get_node_ids()[BAD]} (partition {BAD})")
    report = run.strategy.reports[1]
    assert report.participants == [0, 1, 2]
    of_clients, means = report.clients, run.result.train_metrics_clientapp
    if kind == MessageType.EVALUATE:
        of_clients, means = report.evaluations, run.result.evaluate_metrics_clientapp
    honest = [of_clients["0"], of_clients["2"]]
    counts = [one["num-examples"] for one in honest]
    mean = np.average([one[name] for one in honest], weights=counts)
    assert means[2][name] == pytest.approx(mean)


@pytest.mark.parametrize(
    ("name", "value"), [("accuracy", 87.0), ("class-num-examples", [10.0, 0.0])]
)
def test_a_metric_that_most_clients_have_beyond_its_range_stays(
    federate, datasets, mlp, caplog, name: str, value: Any
) -> None:
    """A user's accuracy may be in percent, and a list is no count of a test set."""
    everybody = (0, 1, 2)
    wrap = functools.partial(
        spoiling, metric(name, value), kind=MessageType.EVALUATE, who=everybody
    )
    run = federate(FedAvg(), mlp, datasets, rounds=1, wrap=wrap)
    assert run.result.evaluate_metrics_clientapp[1][name] == pytest.approx(value)
    assert not warnings_of(caplog, "left out")


def test_tests_without_examples_are_told(federate, datasets, mlp, caplog) -> None:
    wrap = functools.partial(
        spoiling, count(0), kind=MessageType.EVALUATE, who=(0, 1, 2)
    )
    federate(FedAvg(), mlp, datasets, rounds=1, wrap=wrap)
    (told,) = warnings_of(caplog, "zero examples")
    assert "all 3 tests" in told


@pytest.mark.parametrize(
    ("name", "value"),
    [("0.bias", np.inf), ("1.running_mean", np.nan), ("1.running_var", -1.0)],
)
def test_an_initial_entry_that_every_reply_would_repeat_is_refused_before_the_run(
    mlp, name: str, value: float
) -> None:
    state = to_state(mlp().state_dict())
    state[name] = put(value)(state[name].copy())
    with pytest.raises(
        ConfigError, match=rf"^initial_arrays: entry '{name}' (contains|has) .*{value}"
    ):
        FedAvg().prepare(to_record(state), 1, 1.0)


def test_a_count_other_than_that_of_the_query_is_told_once_for_each_node(
    federate, datasets, mlp, caplog
) -> None:
    """The query's count is the weight of the reply."""
    run = federate(
        FedAvg(),
        mlp,
        datasets,
        rounds=2,
        wrap=functools.partial(spoiling, count(99)),
    )
    node_id, size = run.grid.get_node_ids()[BAD], len(datasets[BAD])
    (said,) = [text for text in caplog.messages if "num-examples=99" in text]
    assert f"node {node_id} (partition {BAD}): " in said
    assert f"num-examples=99, but it answered the query with {size}" in said
    run_with_query_count = federate(FedAvg(), mlp, datasets, rounds=2)
    assert all(
        (run.state[name] == array).all()
        for name, array in run_with_query_count.state.items()
    )


def warnings_of(caplog, word: str) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelname == "WARNING" and word in record.getMessage()
    ]


def without_queries(spoil: Spoil, client_fn: Any, kind: str = MessageType.TRAIN) -> Any:
    """Return an app with a bad client that has no function for queries."""
    answer, app = spoiling(spoil, client_fn, kind=kind), ClientApp()
    app.train()(answer)
    app.evaluate()(answer)
    return app


@pytest.mark.parametrize("kind", [MessageType.TRAIN, MessageType.EVALUATE])
def test_a_weight_that_is_far_from_the_others_names_its_node(
    federate, datasets, mlp, caplog, kind: str
) -> None:
    wrap = functools.partial(without_queries, count(10**12), kind=kind)
    with caplog.at_level("INFO", logger="flwr"):
        run = federate(FedAvg(), mlp, datasets, rounds=2, wrap=wrap)
    what = "average" if kind == MessageType.TRAIN else "test"
    node_id = run.grid.get_node_ids()[BAD]
    (told,) = warnings_of(caplog, f"its weight in the {what}")
    assert told.startswith(f"node {node_id}: its weight")
    assert "1e+12" in told
    shares = [text for text in caplog.messages if "largest share" in text]
    largest = "100.0 %" if kind == MessageType.TRAIN else "46.4 %"
    assert len(shares) == 2
    assert all(f"{largest} (node {node_id}" in s for s in shares)


def test_one_of_two_nodes_can_be_far_from_the_other() -> None:
    values = {Node(1, 0): 10, Node(2, 1): 1e12}
    assert [*far_from_others("w", values, 1000)] == [Node(2, 1)]


def test_a_model_far_from_the_others_is_the_cause_of_a_divergence(
    federate, datasets, mlp, caplog
) -> None:
    """The values are finite, but the other clients cannot train from their average."""
    spoil = spoil_state(
        lambda state: state.update({n: a * 9e5 for n, a in state.items()})
    )
    run = federate(
        FedAvg(),
        lambda: mlp(norm=False).float(),
        [Points(one.inputs.float(), one.targets) for one in datasets],
        rounds=9,
        wrap=functools.partial(spoiling, spoil),
        fails=DivergedError,
    )
    node_id = run.grid.get_node_ids()[BAD]
    (told,) = warnings_of(caplog, "the norm of its model")
    assert told.startswith(f"node {node_id} (partition {BAD}): ")
    assert f"node {node_id} (partition {BAD}): the norm of its model" in str(run.error)
    assert "training steps" not in str(run.error)


@pytest.mark.parametrize(
    "text", ["a\nb\x1b[2J\u202e", "x" * 5_000_000], ids=["control", "long"]
)
@pytest.mark.parametrize("kind", [MessageType.TRAIN, MessageType.QUERY, "both"])
def test_the_error_of_a_client_is_one_short_line(
    federate, datasets, mlp, caplog, text: str, kind: str
) -> None:
    def complain(content: RecordDict) -> None:
        raise RuntimeError(text)

    kinds = (MessageType.TRAIN, MessageType.EVALUATE) if kind == "both" else (kind,)
    with caplog.at_level("INFO", logger="flwr"):
        run = federate(
            FedAvg(),
            mlp,
            datasets,
            rounds=1,
            wrap=functools.partial(spoiling, complain, kind=kinds),
        )
    ours = [r.getMessage() for r in caplog.records if "fedbn_flwr" in r.pathname]
    reasons = [*run.strategy.reports[0].rejected.values()]
    shown = r"a\nb\x1b[2J\u202e" if len(text) < 99 else "xxx ... xxx"
    assert any(shown in line for line in ours)
    assert all(one.isprintable() and len(one) < 5000 for one in [*ours, *reasons])


def test_metrics_of_another_kind_do_not_end_the_run(federate, datasets, mlp) -> None:
    def spoil(content: RecordDict) -> None:
        content["metrics"]["train-loss"] = [1.0, 2.0]

    run = federate(
        FedAvg(), mlp, datasets, rounds=1, wrap=functools.partial(spoiling, spoil)
    )
    assert run.strategy.reports[0].participants == [0, 1, 2]
    assert "train-loss" not in run.result.train_metrics_clientapp[1]
    assert run.result.train_metrics_clientapp[1]["steps"] == 2 + 3 + 2


def test_a_bad_test_is_reported_beside_a_bad_training(federate, datasets, mlp) -> None:
    def report_of(spoil: Spoil, kinds: Collection[str]) -> Any:
        def wrap(client_fn: Any) -> ClientApp:
            return spoiling(spoil, client_fn, kind=kinds)

        return federate(FedAvg(), mlp, datasets, rounds=1, wrap=wrap).strategy.reports[
            0
        ]

    report = report_of(count(-1), [MessageType.EVALUATE])
    (reason,) = report.rejected.values()
    assert "(partition 1): evaluation: 'num-examples' is -1" in reason
    assert list(report.evaluations) == ["0", "2"]
    # A client that has nothing to test on is left out without a complaint.
    report = report_of(count(0), [MessageType.EVALUATE])
    assert not report.rejected
    assert list(report.evaluations) == ["0", "2"]
    (reason,) = report_of(
        fail, [MessageType.TRAIN, MessageType.EVALUATE]
    ).rejected.values()
    assert reason.count("disk full") == 2


@pytest.mark.parametrize("seed", range(2))
def test_after_any_refusal_the_next_message_has_the_whole_model(
    federate, datasets, mlp, seed: int
) -> None:
    """A client that fails may be a restarted SuperNode, with an empty context."""
    draw = random.Random(seed)

    def faulty(message: Message, context: Context, call_next: Any) -> Message:
        kind = message.metadata.message_type
        if context.node_config["partition-id"] != BAD or kind == "query":
            return call_next(message, context)
        fault = draw.choice(["", "", "", "forgets", "raises", "sends NaN"])
        if fault == "forgets":
            context.state.clear()
        if fault == "raises":
            raise RuntimeError("disk full")
        reply = call_next(message, context)
        if fault == "sends NaN" and kind == "train":
            entry("0.weight", put(np.nan))(reply.content)
        return reply

    app = functools.partial(client_app, mods=[faulty])
    run = federate(SiloBN(recalibrate=True), mlp, datasets, rounds=10, wrap=app)
    node_id = run.grid.get_node_ids()[BAD]
    sent = [m for m in run.grid.sent if m.metadata.dst_node_id == node_id]
    received = [m for m in run.grid.received if m.metadata.src_node_id == node_id]
    is_whole, found = True, set()
    for message, reply in zip(sent, received, strict=True):
        kind = message.metadata.message_type
        if kind == "query":
            continue
        assert len(message.content["arrays"]) == (9 if is_whole else 6)
        found.add((kind, is_whole, reply.has_error()))
        if reply.has_error():
            is_whole = True
        elif kind == "train":
            is_whole = bool(np.isnan(views(reply.content["arrays"])["0.weight"]).any())
    assert len(found) > 8
