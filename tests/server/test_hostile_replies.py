"""One node with drawn replies neither ends a run for all, nor changes it unnoticed.

The replies are drawn from a seed: values that are finite and not, sizes, keys, counts,
errors, names and times.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp

from fedbn_flwr.client import client_app
from fedbn_flwr.errors import FedBNError
from fedbn_flwr.messages.protocol import EXCHANGE_QUERY, STATISTICS_QUERY
from fedbn_flwr.messages.records import from_record, to_record
from fedbn_flwr.strategies import (
    FedAdam,
    FedAvg,
    FedBN,
    FedNova,
    FedTAN,
    FixBN,
    Scaffold,
    SiloBN,
    combined,
)
from fedbn_flwr.strategies.fednova import TAU
from fedbn_flwr.transport.turns import Wait
from tests.support.bad_replies import BAD
from tests.support.fast import fast
from tests.support.in_process import app_of
from tests.support.points import Points

SIZES = (6, 13, 9)
METHODS = {
    "fedavg": FedAvg,
    "fedbn": partial(FedBN, eval_on="personal-own,averaged-bn"),
    "fedtan": FedTAN,
    "scaffold": partial(combined(Scaffold, FixBN), freeze_at=9),
    "fednova": partial(combined(FedNova, FixBN), freeze_at=9),
    "fedadam": FedAdam,
    "fixbn": partial(FixBN, freeze_at=1),
    "silobn": partial(SiloBN, recalibrate=True),
}
OFTEN = {
    "fedtan": EXCHANGE_QUERY,
    "silobn": STATISTICS_QUERY,
    "fednova": MessageType.TRAIN,
    "scaffold": MessageType.TRAIN,
}
"""The messages to which half of the drawn replies of a method belong."""
KINDS = (
    MessageType.TRAIN,
    MessageType.TRAIN,
    MessageType.EVALUATE,
    MessageType.QUERY,
    EXCHANGE_QUERY,
)
NUMBERS = (
    0,
    -1,
    1,
    10**12,
    2**63 - 1,
    -(2**63),
    0.5,
    1e-300,
    1e-9,
    1e9,
    1e30,
    3e38,
    1e300,
    -1e30,
    *[np.nan, np.inf, -np.inf] * 2,
)
TEXTS = (
    "",
    "x",
    "1",
    "0.weight",
    "a\nb",
    "\x1b[2J\x1b[31mred",
    "\u202eabc",
    "../../x",
    "none",
    "[not-finite] x",
    "[clients-config] x",
    "[comes-again] x",
    "[fixed-lost] x",
    "[too-few-left] x",
    "ConfigError: x",
    "," * 9,
    "5 MB ".ljust(5_000_000, "y"),
)
SAID = (
    "partition-id",
    "site-name",
    "unusable",
    "refusal",
    "node-versions",
    "fedbn-flwr.hooks-applied",
    "fedbn-flwr.local-sha256",
    "fedbn-flwr.packs",
    "fedbn-flwr.local-home",
    "fedbn-flwr.synchronises",
)
LONGEST_LINE = 5000
TIMEOUT = 4.0  # seconds


def drawn_array(draw: random.Random, like: np.ndarray) -> np.ndarray:
    """Return an array that is like an honest one, but for one property."""
    array, number = np.array(like), draw.choice(NUMBERS)
    if array.dtype.kind != "f":
        number = int(number) if np.isfinite(number) and abs(number) < 2**63 else 0
    with np.errstate(all="ignore"):
        match draw.randrange(6):
            case 0 if array.size:
                array.flat[draw.randrange(array.size)] = number
            case 1:
                array[...] = number
            case 2:
                array = array.astype(draw.choice(["f2", "f4", "f8", "i8", "c8", "?"]))
            case 3:
                array = array.reshape(-1)[: draw.randrange(array.size + 1)]
            case 4:
                array = array[None]
            case _:
                factor = draw.choice([-1.0, 0.0, 1e3, 1e9, 1e20, 1e29])
                array = (array * factor).astype(array.dtype)
    return array


def spoil_arrays(draw: random.Random, content: RecordDict) -> None:
    """Change an entry of a record of arrays, or the record."""
    if not content.array_records:
        return
    key = draw.choice([*content.array_records])
    entries = dict(content.array_records[key])
    name = draw.choice([*entries, "0.bias"])
    match draw.randrange(8):
        case 0:
            entries.pop(name, None)
        case 1:
            entries[draw.choice(TEXTS)] = Array(np.zeros(2))
        case 2:
            entries[name] = Array("float64", (4,), "numpy.ndarray", b"not an array")
        case 3:
            content.pop(key)
            return
        case 4:
            entries = dict(reversed(entries.items()))
        case _ if name in entries:
            like = from_record(ArrayRecord({name: entries[name]}))[name]
            entries[name] = to_record({name: drawn_array(draw, like)})[name]
    content[key] = ArrayRecord(entries)


def spoil_metrics(draw: random.Random, content: RecordDict) -> None:
    """Change a metric, or the record."""
    if not content.metric_records:
        return
    metrics = content.metric_records[draw.choice([*content.metric_records])]
    name = draw.choice([*metrics, *["num-examples"] * 3, "loss", draw.choice(TEXTS)])
    match draw.randrange(6):
        case 0:
            metrics.pop(name, None)
        case 1:
            metrics[name] = [float(draw.choice(NUMBERS)), float(draw.choice(NUMBERS))]
        case 2:
            content["more"] = MetricRecord({"num-examples": 3})
        case 3:
            metrics[f"{draw.choice(TEXTS)}-num-examples"] = draw.choice(NUMBERS)
            metrics[f"{draw.choice(TEXTS)}-loss"] = draw.choice(NUMBERS)
        case _:
            metrics[name] = draw.choice(NUMBERS)


def spoil_tau(draw: random.Random, content: RecordDict) -> None:
    """Change FedNova's tau, because it may scale the steps of all clients."""
    (metrics,) = content.metric_records.values()
    metrics[TAU] = float(draw.choice(NUMBERS))


def spoil_variates(draw: random.Random, content: RecordDict) -> None:
    """Change SCAFFOLD's variates, because they correct all clients' steps."""
    if "variates" in content.array_records:
        found = from_record(content["variates"])
        factor = draw.choice([0.0, -1.0, 1e2, 1e4, -1e6, 1e8, 1e29])
        add = draw.choice([0.0, 1e4, -1e6, 1e8])
        found = {n: (a * factor + add).astype(a.dtype) for n, a in found.items()}
        content["variates"] = to_record(found)


def spoil_counter(draw: random.Random, content: RecordDict) -> None:
    """Change the counters: they stop BatchNorm with ``momentum=None``."""
    if "arrays" in content.array_records:
        found = from_record(content["arrays"])
        for name in [n for n in found if n.endswith("num_batches_tracked")]:
            found[name] = np.array(draw.choice([-1, 0, 10**5, 10**15, 2**63 - 1]))
        content["arrays"] = to_record(found)


def spoil_test(draw: random.Random, content: RecordDict) -> None:
    """Change the measured values."""
    for metrics in content.metric_records.values():
        for name in [*metrics]:
            if name.endswith(("loss", "accuracy")) and draw.random() < 0.7:
                metrics[name] = float(draw.choice([*NUMBERS, 900, -(10**6)]))


def spoil_names(draw: random.Random, content: RecordDict) -> None:
    """Change the reports of the client code."""
    info = dict(content.config_records.get("properties", {}))
    name = draw.choice([*info, *SAID, draw.choice(TEXTS)])
    info[name] = draw.choice([*TEXTS, *NUMBERS, b"\xff", ["a"], [1, 2], True])
    content["properties"] = ConfigRecord(info)


def comes_late(draw: random.Random, content: RecordDict) -> None:
    """Answer later than the round waits."""
    with Wait():
        threading.Event().wait(TIMEOUT + 1)


def raises(draw: random.Random, content: RecordDict) -> None:
    raise RuntimeError(draw.choice(TEXTS))


SPOILS = (
    *[spoil_arrays] * 4,
    *[spoil_metrics] * 3,
    *[spoil_names] * 2,
    *[spoil_counter, spoil_test] * 2,
    *[raises, None],
)
OF_METHOD = {"fednova": spoil_tau, "scaffold": spoil_variates}
"""The lie about what only this method sends."""


class Sent:
    """The states and counts of all nodes, and the names of the hostile node."""

    def __init__(self) -> None:
        self.names = {f"client {BAD}", f"partition {BAD}"}
        self.lied = False
        # three by round and partition, in replies; one by partition, in answers
        self.states, self.counts, self.taus, self.answered = ({}, {}, {}, {})  # type: ignore[var-annotated]

    def note(self, number: Any, partition: Any, kind: str, reply: Message) -> None:
        """Note the state and the count of a reply, if they can be read."""
        with suppress(Exception):
            metrics = [*reply.content.metric_records.values()]
            counts = [one["num-examples"] for one in metrics if "num-examples" in one]
            if kind == MessageType.QUERY:
                self.answered[partition] = counts[-1] if counts else None
            elif kind == MessageType.TRAIN:
                state = from_record(reply.content["arrays"])
                self.states[number, partition] = state
                self.counts[number, partition] = counts[0]
                self.taus[number, partition] = metrics[0].get(TAU)

    def weight(self, number: int, partition: int) -> float:
        count = self.answered.get(partition)
        known = isinstance(count, int) and count >= 0
        return float(count if known else self.counts[number, partition])


def hostile(
    client_fn: Any, draw: random.Random, sent: Sent, often: str, of_method: Any
) -> ClientApp:
    """Return the usual app. Its partition BAD sends drawn replies."""
    whole = client_app(client_fn)
    kinds = {draw.choice(KINDS) for _ in range(draw.choice([1, 1, 2]))}
    if often and draw.random() < 0.5:
        kinds = {often}
    rounds = draw.choice([{1}, {2}, {1, 2, 3}])
    times = draw.choice([1, 1, 2])
    spoil = comes_late if draw.random() < 0.01 else draw.choice(SPOILS)
    if often == MessageType.TRAIN and kinds == {often}:
        spoil = of_method

    def answer(message: Message, context: Context) -> Message:
        configs = [*message.content.config_records.values(), ConfigRecord()]
        number, kind = configs[0].get("server-round"), message.metadata.message_type
        reply = whole(message, context)
        partition = context.node_config["partition-id"]
        lies = partition == BAD and kind in kinds and not reply.has_error()
        if lies and (number in rounds or kind == MessageType.QUERY):
            sent.names.add(f"node {context.node_id}")
            sent.lied = True
            if spoil is None:
                error = Error(draw.choice([0, 1, 7, 107, 999]), draw.choice(TEXTS))
                return Message(error, reply_to=message)
            for _ in range(times):
                spoil(draw, reply.content)
        sent.note(number, partition, kind, reply)
        return reply

    return app_of(answer)


@pytest.mark.parametrize("seed", fast(range(1000), *range(0, 28, 3), 4, 28))
def test_a_run_with_a_hostile_node_keeps_the_law(
    federate, datasets, mlp, same_bits, caplog, seed: int
) -> None:
    """The run ends with a model or an error of the package, never with a traceback.

    An error, and a refusal, names the node. Each global model is the average of the
    honest replies, moved by the share of the hostile reply if it was used. The log has
    one line for each message.
    """
    draw, sent = random.Random(seed), Sent()
    method = [*METHODS][seed % len(METHODS)]
    dtype = draw.choice([torch.float32, torch.float64])
    strategy = METHODS[method](on_divergence=draw.choice(["stop", "continue"]))
    data = [Points(one.inputs.to(dtype), one.targets) for one in datasets]
    often, text = OFTEN.get(method, ""), ""
    caplog.set_level("INFO", logger="flwr")
    try:
        run = federate(
            strategy,
            lambda: mlp().to(dtype),
            data,
            wrap=lambda client_fn: hostile(
                client_fn, draw, sent, often, OF_METHOD.get(method)
            ),
            timeout=TIMEOUT,
            grid_options={"threads": 3},
        )
    except FedBNError as error:
        text = str(error)
        assert sent.lied, f"an honest run failed: {text}"
        assert any(name in text for name in sent.names), f"does not name: {text[:900]}"
    # Flower writes tracebacks of clients in several lines.
    for line in [r.getMessage() for r in caplog.records if "fedbn_flwr" in r.pathname]:
        assert len(line) <= LONGEST_LINE, f"a line of {len(line)}: {line[:300]}"
        assert line.isprintable(), f"control characters in {line[:500]!r}"
    if text:
        return
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    named = [one for one in warnings if any(name in one for name in sent.names)]
    # Means of tests are in their range, and large only with a warning.
    for metrics in run.result.evaluate_metrics_clientapp.values():
        loss = metrics.get("loss", 0.0)
        assert 0 <= metrics.get("accuracy", 0) <= 1
        assert loss >= 0
        assert loss < 1e3 or named, f"loss {loss}, and no warning"
    bad = run.grid.inner.get_node_ids()[BAD]
    for report, before, after in zip(
        strategy.reports, run.history, run.history[1:], strict=False
    ):
        for name, array in after.items():
            assert np.isfinite(array).all(), f"entry {name} is not finite"
            if name.endswith("num_batches_tracked"):
                assert array - before[name] <= 10**6, f"{name} grew to {array}"
        if report.kept_previous:
            same_bits(after, before)
            continue
        used = [i for i in report.participants if i in (0, 2)]
        # A hostile model may be too large for the training of the others.
        assert len(used) == 2 or strategy.run.start.far_model, report.rejected
        # The hostile node may report another partition.
        used += [BAD] * (len(report.participants) - len(used))
        if BAD not in used and sent.lied:
            named = "node" in report.rejected.get(bad, "") or str(BAD) in report.missing
            # A node without data is not asked.
            assert named or report.asked < len(SIZES), report
        number = report.server_round
        states = {i: sent.states[number, i] for i in used}
        weights = dict.fromkeys(used, 1.0)
        if method != "scaffold":
            weights = {i: sent.weight(number, i) for i in used}
        if far_weights(states):
            assert any("the norm of its" in one for one in named), "no warning"
        taus = {i: sent.taus[number, i] for i in used}
        check_bounds(method, states, weights, taus, before, after, number)


def far_weights(states: Mapping[int, Any]) -> bool:
    """Return whether the hostile weights have a hundred times the honest norm."""
    norms = {}
    for i, s in states.items():
        own = [s[name].astype(float).ravel() for name in ("0.weight", "3.weight")]
        norms[i] = np.linalg.norm(np.concatenate(own))
    return BAD in norms and norms[BAD] > 100 * norms[min(norms)]


def check_bounds(
    method: str,
    states: Mapping[int, Any],
    weights: Mapping[int, float],
    taus: Mapping[int, Any],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    number: int,
) -> None:
    """Check that a hostile reply moved the honest average by its share at most.

    FedNova divides the hostile change by its tau, and multiplies all changes by the
    mean tau. FedAdam's step has a longest length, whatever the clients send.
    """
    share = weights.get(BAD, 0.0) / sum(weights.values())
    honest = [i for i in states if i != BAD]
    for name, value in after.items():
        if value.dtype.kind != "f" or any(name not in s for s in states.values()):
            continue
        is_buffer = "running" in name
        if method == "scaffold" and is_buffer:
            continue
        wide = {i: s[name].astype(np.float64) for i, s in states.items()}
        mean = start = before[name].astype(np.float64)
        if honest:
            own = [weights[i] for i in honest]
            mean = np.average([wide[i] for i in honest], axis=0, weights=own)
        off = share * np.abs(wide[BAD] - mean) if BAD in wide else 0.0
        if method == "fedadam" and not is_buffer:
            mean, off = start, longest_step(number)
        if method == "fednova" and not is_buffer and BAD in wide and len(honest) == 2:
            mean, off = nova(share, taus, mean - start, wide[BAD] - start) + start, 0.0
        rough = 100 * np.finfo(value.dtype).eps
        most = off + rough * (1 + np.abs(mean) + off)
        moved = np.abs(value.astype(np.float64) - mean)
        assert (moved <= most).all(), f"{name}: moved by {moved}, at most {most}"


def nova(share: float, taus: Mapping[int, float], honest: Any, bad: Any) -> Any:
    """Return FedNova's change, if the honest nodes have one tau."""
    ratio = taus[BAD] / taus[0]
    assert 1e-6 <= ratio <= 1e6, f"{ratio} is not refused"
    return (1 - share + share * ratio) * ((1 - share) * honest + share * bad / ratio)


def longest_step(t: int, eta: float = 0.1, b1: float = 0.9, b2: float = 0.99) -> float:
    """Return the longest step of FedAdam in a round, by Cauchy and Schwarz."""
    rate = eta * math.sqrt(1 - b2 ** (t + 1)) / (1 - b1 ** (t + 1))
    ratios = sum((b1**2 / b2) ** k for k in range(t))
    return rate * (1 - b1) * math.sqrt(ratios / (1 - b2))
