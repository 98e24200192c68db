"""A client with bad replies is named and left out, as if it were not there."""

from __future__ import annotations

import functools
import io
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import (
    Array,
    Context,
    Message,
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
    fail,
    put,
    spoil_entry,
    spoil_state,
    spoiling,
)
from tests.support.points import Points
from tests.support.written_out import close

SIZES = (6, 13, 9)


LARGE = b"\x93NUMPY\x02\x00" + (2**29).to_bytes(4, "little") + b" " * 2**24
"""A header in another version: its parser copies it several times."""


def garbage(data: bytes, dtype: str = "float64") -> Spoil:
    spoilt = {"0.bias": Array(dtype, (4,), "numpy.ndarray", data)}
    return lambda content: content["arrays"].update(spoilt)


def wrong_header(content: RecordDict) -> None:
    """Keep the array's data but spoil its description."""
    garbage(content["arrays"]["0.bias"].data, "nonsense")(content)


def metric(name: str, value: Any) -> Spoil:
    return lambda content: content["metrics"].update({name: value})


def count(value: float) -> Spoil:
    return metric("num-examples", value)


def two_metrics(content: RecordDict) -> None:
    content["more"] = MetricRecord({"num-examples": 3})


def object_array() -> bytes:
    out = io.BytesIO()
    np.save(out, np.asarray([{"a": 1}], dtype=object), allow_pickle=True)
    return out.getvalue()


HEADER = b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 's"
WRONG = {
    # The spoiled reply and the name in the refusal, by fault.
    "nan": (spoil_entry("0.weight", put(np.nan, 3)), "'0.weight'"),
    "huge": (spoil_entry("0.weight", put(-1e31, 3)), "contains -1e+31"),
    "grown": (spoil_entry("0.weight", lambda a: a * 1e7), "'0.weight' has the norm"),
    "inf": (spoil_entry("1.running_mean", put(-np.inf)), "'1.running_mean'"),
    "shape": (
        spoil_entry("0.bias", lambda a: a[:2]),
        "'0.bias' has shape (2,), expected (4,)",
    ),
    "dtype": (
        spoil_entry("0.bias", lambda a: a.astype(np.float32)),
        "'0.bias' has dtype float32, expected float64",
    ),
    "missing": (lambda content: content["arrays"].pop("3.bias"), "'3.bias' is missing"),
    "extra": (
        lambda content: content["arrays"].update(own=Array(np.zeros(1))),
        "'own' was not asked for",
    ),
    "variance": (
        spoil_entry("1.running_var", put(-0.5, 2)),
        "'1.running_var' has a negative variance, -0.5",
    ),
    "zero": (count(0), "'num-examples' is 0"),
    "negative": (count(-3), "'num-examples' is -3"),
    "count nan": (count(np.nan), "'num-examples' is nan"),
    "no count": (
        lambda content: content["metrics"].pop("num-examples"),
        "'num-examples' is None",
    ),
    "error": (fail, "disk full"),
    "no arrays": (lambda content: content.pop("arrays"), "'arrays'"),
    "two metrics": (two_metrics, "2 MetricRecords"),
    "count of a set": (metric("own-num-examples", -5.0), "'own-num-examples' is -5.0"),
    "name": (metric("\x1b[2Jloss", 1.0), r"the name '\x1b[2Jloss'"),
    "long name": (metric("n" * 300, 1.0), "a metric has the name 'nnn"),
    "counter": (
        spoil_entry("1.num_batches_tracked", lambda a: a + 10**15),
        "'1.num_batches_tracked' grew by 10000000000000",
    ),
    "largest counter": (
        spoil_entry("1.num_batches_tracked", lambda a: a * 0 + (2**63 - 1)),
        "'1.num_batches_tracked' grew by 9223372036854775",
    ),
    "many metrics": (
        lambda content: content["metrics"].update({f"m{i}": 1.0 for i in range(2000)}),
        "at most 1000 metrics",
    ),
    "long list": (metric("list", [1.0] * 200_000), "100000 numbers"),
    "text": (garbage(b"not an array"), "ValueError"),
    "empty": (garbage(b""), "EOFError"),
    "zip": (garbage(b"PK\x03\x04nonsense"), "BadZipFile"),
    "cut off": (garbage(HEADER), "ValueError"),
    "object": (garbage(object_array()), "ValueError"),
    "header": (wrong_header, "TypeError"),
    "large": (garbage(LARGE), f"'0.bias' has {len(LARGE)} bytes"),
}
CODES = {
    # The codes of these refusals. The others have none.
    **dict.fromkeys(("nan", "huge", "grown"), NOT_FINITE),
    "inf": STATISTICS_NOT_FINITE,
}


@pytest.fixture
def run_spoilt(federate_mlp) -> Callable[..., Any]:
    """Provide ``run_spoilt(spoil, make=FedAvg, rounds=1, wrap=spoiling, ...)``.

    It runs over clients of which one sends spoilt replies. It takes the options of
    ``spoiling``.
    """

    def run(
        spoil: Spoil,
        make: Any = FedAvg,
        rounds: int = 1,
        wrap: Any = spoiling,
        **options: Any,
    ) -> Any:
        return federate_mlp(make(), rounds=rounds, wrap=wrap(spoil, **options))

    return run


def bad_node(run: Any) -> str:
    """Return the words that name the bad client's node."""
    return f"node {run.grid.get_node_ids()[BAD]} (partition {BAD})"


@pytest.fixture
def without_bad(federate_mlp, points):
    """Return a function that runs a strategy with a bad client without data."""
    others = [points(6, 0), points(0), points(9, 2)]
    return functools.partial(federate_mlp, datasets=others)


WITHOUT = []
VALUES = (np.nan, np.inf, 1e30, -3e38)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_bad_reply_is_refused_by_name(run_spoilt, without_bad, wrong: str) -> None:
    spoil, name = WRONG[wrong]
    run = run_spoilt(spoil)
    why = run.reason(BAD)
    (report,) = run.reports
    assert [*report.rejected.values()] == [why]
    assert report.missing == [str(BAD)]
    assert why.startswith(f"{bad_node(run)}: ")
    assert name in why
    (node_id,) = report.rejected
    assert report.codes.get(node_id) == ({CODES[wrong]} if wrong in CODES else None)
    assert (report.participants, report.kept_previous) == ([0, 2], False)
    assert list(report.clients) == ["0", "2"]
    if not WITHOUT:
        WITHOUT.append(without_bad(FedAvg(), rounds=1).state)
    close(run.state, *WITHOUT)


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
    run_spoilt, record, name, change: Callable[[np.ndarray], Any], said
) -> None:
    def spoil(content: RecordDict) -> None:
        found = {n: array.copy() for n, array in views(content[record]).items()}
        found[name] = change(found.get(name, np.zeros(4)))
        content[record] = to_record(found)

    make = functools.partial(FedBN, eval_on=SHARED_BN)
    if record == VARIATES:
        make = combined(Scaffold, MTFL)
    reason = run_spoilt(spoil, make).reason(BAD)
    assert f"(partition {BAD}): record '{record}': " in reason
    assert f"entry '{name}'" in reason
    assert said in reason


def test_a_node_of_unknown_batch_size_is_left_out_of_a_synchronised_step(
    run_spoilt,
) -> None:
    run = run_spoilt(RecordDict.clear, FedTAN, kind="query")
    assert "the size of the first batch" in run.reason(BAD)
    assert run.reports[0].participants == [0, 2]


def variates(value: float) -> Spoil:
    def spoil(content: RecordDict) -> None:
        found = views(content[VARIATES])
        content[VARIATES] = to_record({n: a * 0 + value for n, a in found.items()})

    return spoil


def times(factor: float, *names: str) -> Spoil:
    """Multiply the named entries, or all."""
    return spoil_state(
        lambda state: state.update({n: state[n] * factor for n in names or state})
    )


FAR = {
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
    run_spoilt, without_bad, lie: str
) -> None:
    """The run equals the run without the node, from the round of the lie."""
    strategy, spoil, name = FAR[lie]
    run = run_spoilt(spoil, strategy, rounds=2)
    assert all(name in run.reason(BAD, number) for number in (1, 2))
    without = without_bad(strategy(), rounds=2)
    if strategy is FedNova:  # N of SCAFFOLD counts the node
        close(run.state, without.state)
    last = np.abs(run.state["0.weight"] - without.state["0.weight"]).max()
    assert last < 0.1, "c has no part of the lie"


@pytest.mark.parametrize("factor", [100.0, -300.0])
def test_weights_far_from_the_others_name_their_node(
    run_spoilt, caplog, factor: float
) -> None:
    run = run_spoilt(times(factor, "0.weight", "3.weight"))
    (told,) = warnings_of(caplog, "the norm of its weights")
    assert told.startswith(bad_node(run))


LIES = {
    # The kind of message, the metric, and the lie.
    "training": ("train", "train-loss", np.nan),
    "infinite": ("train", "train-loss", -np.inf),
    "test": ("evaluate", "loss", np.nan),
    "shares": ("evaluate", "accuracy", 900.0),
    "negative": ("evaluate", "accuracy", -0.5),
    "loss": ("evaluate", "loss", -1e6),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_metric_out_of_its_range_is_left_out_of_the_mean(
    run_spoilt, caplog, lie: str
) -> None:
    """The run continues, and the mean is the mean of the other clients."""
    kind, name, value = LIES[lie]
    run = run_spoilt(metric(name, value), rounds=2, kind=kind)
    (told,) = warnings_of(caplog, f"'{name}' is {value:g}")
    assert told.startswith(bad_node(run))
    report = run.reports[1]
    assert report.participants == [0, 1, 2]
    of_clients, means = report.clients, run.result.train_metrics_clientapp
    if kind == "evaluate":
        of_clients, means = report.evaluations, run.result.evaluate_metrics_clientapp
    honest = [of_clients["0"], of_clients["2"]]
    counts = [one["num-examples"] for one in honest]
    mean = np.average([one[name] for one in honest], weights=counts)
    assert means[2][name] == pytest.approx(mean)


EVERYBODY = {"kind": "evaluate", "who": (0, 1, 2)}


@pytest.mark.parametrize(
    ("name", "value"), [("accuracy", 87.0), ("class-num-examples", [10.0, 0.0])]
)
def test_a_metric_that_most_clients_have_beyond_its_range_stays(
    run_spoilt, caplog, name: str, value
) -> None:
    """A user's accuracy may be in percent, and a list is no count of a test set."""
    run = run_spoilt(metric(name, value), **EVERYBODY)
    assert run.result.evaluate_metrics_clientapp[1][name] == pytest.approx(value)
    assert not warnings_of(caplog, "left out")


def test_tests_without_examples_are_told(run_spoilt, caplog) -> None:
    run_spoilt(count(0), **EVERYBODY)
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
    run_spoilt, caplog, same_bits
) -> None:
    """The query's count is the weight of the reply."""
    run = run_spoilt(count(99), rounds=2)
    (said,) = [text for text in caplog.messages if "num-examples=99" in text]
    assert f"{bad_node(run)}: " in said
    assert f"num-examples=99, but it answered the query with {SIZES[BAD]}" in said
    same_bits(run.state, run_spoilt(count(99), rounds=2, who=()).state)


def warnings_of(caplog, word: str) -> list[str]:
    told = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    return [text for text in told if word in text]


def without_queries(spoil: Spoil, kind: str) -> Any:
    """Return a wrapper of apps whose clients have no function for queries."""

    def wrap(client_fn: Any) -> ClientApp:
        answer, app = spoiling(spoil, kind=kind)(client_fn), ClientApp()
        app.train()(answer)
        app.evaluate()(answer)
        return app

    return wrap


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_weight_that_is_far_from_the_others_names_its_node(
    run_spoilt, caplog, kind: str
) -> None:
    caplog.set_level("INFO", logger="flwr")
    run = run_spoilt(count(10**12), rounds=2, wrap=without_queries, kind=kind)
    what, largest = "test", "46.4 %"
    if kind == "train":
        what, largest = "average", "100.0 %"
    node_id = run.grid.get_node_ids()[BAD]
    (told,) = warnings_of(caplog, f"its weight in the {what}")
    assert told.startswith(f"node {node_id}: its weight")
    assert "1e+12" in told
    shares = [text for text in caplog.messages if "largest share" in text]
    assert len(shares) == 2
    assert all(f"{largest} (node {node_id}" in s for s in shares)


def test_one_of_two_nodes_can_be_far_from_the_other() -> None:
    values = {Node(1, 0): 10, Node(2, 1): 1e12}
    assert [*far_from_others("w", values, 1000)] == [Node(2, 1)]


def test_a_model_far_from_the_others_is_the_cause_of_a_divergence(
    federate_mlp, datasets, mlp, caplog
) -> None:
    """The values are finite, but the other clients cannot train from their average."""
    run = federate_mlp(
        FedAvg(),
        model=lambda: mlp(norm=False).float(),
        datasets=[Points(one.inputs.float(), one.targets) for one in datasets],
        rounds=9,
        wrap=spoiling(times(9e5)),
        fails=DivergedError,
    )
    (told,) = warnings_of(caplog, "the norm of its model")
    assert told.startswith(f"{bad_node(run)}: ")
    assert f"{bad_node(run)}: the norm of its model" in str(run.error)
    assert "training steps" not in str(run.error)


@pytest.mark.parametrize(
    "text", ["a\nb\x1b[2J\u202e", "x" * 5_000_000], ids=["control", "long"]
)
@pytest.mark.parametrize(
    "kinds", [("train",), ("query",), ("train", "evaluate")], ids="+".join
)
def test_the_error_of_a_client_is_one_short_line(
    run_spoilt, caplog, text: str, kinds: tuple[str, ...]
) -> None:
    def complain(content: RecordDict) -> None:
        raise RuntimeError(text)

    caplog.set_level("INFO", logger="flwr")
    (report,) = run_spoilt(complain, kind=kinds).reports
    ours = [r.getMessage() for r in caplog.records if "fedbn_flwr" in r.pathname]
    shown = r"a\nb\x1b[2J\u202e" if len(text) < 99 else "xxx ... xxx"
    assert any(shown in line for line in ours)
    for one in (*ours, *report.rejected.values()):
        assert one.isprintable()
        assert len(one) < 5000


@pytest.mark.parametrize("value", [[1.0], [1.0, 2.0], []], ids=len)
@pytest.mark.parametrize(
    ("kind", "name"),
    [("train", "train-loss"), ("train", "steps"), ("evaluate", "loss")],
)
def test_a_metric_of_another_length_is_left_out_by_name(
    run_spoilt, without_bad, caplog, kind: str, name: str, value: list[float]
) -> None:
    run = run_spoilt(metric(name, value), kind=kind)
    (told,) = warnings_of(caplog, f"'{name}'")
    assert told.startswith(bad_node(run))
    assert run.reports[0].participants == [0, 1, 2]
    of_clients, means = run.reports[0].clients, run.result.train_metrics_clientapp
    if kind == "evaluate":
        of_clients, means = (
            run.reports[0].evaluations,
            run.result.evaluate_metrics_clientapp,
        )
    honest = [of_clients["0"], of_clients["2"]]
    values = [one[name] for one in honest]
    counts = [one["num-examples"] for one in honest]
    mean = sum(values) if name == "steps" else np.average(values, weights=counts)
    assert means[1][name] == pytest.approx(mean)


@pytest.mark.parametrize("value", [1e308, -1e9, [0.5, 1e6], np.inf], ids=str)
@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_metric_far_from_the_others_names_its_node(
    run_spoilt, caplog, kind: str, value: Any
) -> None:
    """The server has no range for a user's metric, such as Flower's eval_loss."""

    def spoil(content: RecordDict, value: Any) -> None:
        content["metrics"]["eval_score"] = value

    honest = functools.partial(
        spoil, value=[0.5, 0.5] if isinstance(value, list) else 0.5
    )
    lies = itertools.cycle([honest, functools.partial(spoil, value=value), honest])
    run = run_spoilt(lambda content: next(lies)(content), kind=kind, who=(0, 1, 2))
    (told,) = warnings_of(caplog, "'eval_score'")
    assert told.startswith(bad_node(run))


def test_a_bad_test_is_reported_beside_a_bad_training(run_spoilt) -> None:
    both = run_spoilt(fail, kind=("train", "evaluate"))
    assert both.reason(BAD).count("disk full") == 2
    # A client that has nothing to test on is left out without a complaint.
    for number, said in ((-1, ["evaluation: 'num-examples' is -1"]), (0, [])):
        run = run_spoilt(count(number), kind="evaluate")
        (report,) = run.reports
        words = [f"{bad_node(run)}: {each}" for each in said]
        assert [why.partition(", ")[0] for why in report.rejected.values()] == words
        assert list(report.evaluations) == ["0", "2"]


@pytest.mark.parametrize("seed", range(2))
def test_after_any_refusal_the_next_message_has_the_whole_model(
    federate_mlp, seed: int
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
            spoil_entry("0.weight", put(np.nan))(reply.content)
        return reply

    app = functools.partial(client_app, mods=[faulty])
    run = federate_mlp(SiloBN(recalibrate=True), rounds=10, wrap=app)
    is_whole, found = True, set()
    for message, reply in zip(run.grid.sent, run.grid.received, strict=True):
        kind = message.metadata.message_type
        if kind == "query" or run.grid.partition(message.metadata.dst_node_id) != BAD:
            continue
        assert len(message.content["arrays"]) == (9 if is_whole else 6)
        found.add((kind, is_whole, reply.has_error()))
        if reply.has_error():
            is_whole = True
        elif kind == "train":
            is_whole = bool(np.isnan(views(reply.content["arrays"])["0.weight"]).any())
    assert len(found) > 8
