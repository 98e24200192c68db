"""Runs in which one node sends drawn replies, and the law that each run obeys.

The replies are drawn from a seed: values that are finite and not, sizes, keys, counts,
errors, names and times. ``python -m tests.support.hostile 1000`` draws a thousand.
"""

from __future__ import annotations

import logging
import random
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
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
from torch import nn

from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.client import client_app
from fedbn_flwr.compat.flower import identify_process
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
)
from fedbn_flwr.training import LearningRate, LocalTraining
from fedbn_flwr.training.randomness import interrupted
from tests.support.federation import run_strategy, torch_clients
from tests.support.points import Points

BAD = 1
SIZES = (6, 13, 9)
ROUNDS = 3
METHODS: dict[str, Callable[..., Any]] = {
    "fedavg": FedAvg,
    "fedbn": lambda **options: FedBN(eval_on="personal-own,averaged-bn", **options),
    "fedtan": FedTAN,
    "scaffold": Scaffold,
    "fednova": FedNova,
    "fedadam": FedAdam,
    "fixbn": lambda **options: FixBN(freeze_at=1, **options),
    "silobn": lambda **options: SiloBN(recalibrate=True, **options),
}
OFTEN = {"fedtan": EXCHANGE_QUERY, "silobn": STATISTICS_QUERY}
"""The messages to which half of the drawn replies of a method belong."""
AVERAGING = {"fedavg", "fedbn", "fedtan", "scaffold", "fixbn"}
KINDS = (
    MessageType.TRAIN,
    MessageType.TRAIN,
    MessageType.EVALUATE,
    MessageType.QUERY,
    EXCHANGE_QUERY,
)
NUMBERS = (
    *(0, -1, 1, 10**12, 2**63 - 1, -(2**63), 0.5, 1e-300, 1e-9, 1e9, 1e30, 3e38),
    *(1e300, -1e30, *[float("nan"), float("inf"), -float("inf")] * 2),
)
TEXTS = (
    *("", "x", "1", "0.weight", "a\nb", "\x1b[2J\x1b[31mred", "\u202eabc", "../../x"),
    *("none", "[not-finite] x", "[clients-config] x", "ConfigError: x", "," * 9),
    "5 MB ".ljust(5_000_000, "y"),
)
LONGEST_LINE = 5000
TIMEOUT = 4.0  # seconds


def drawn_array(draw: random.Random, like: np.ndarray) -> np.ndarray:
    """Return an array that is like an honest one, but for one property."""
    array = np.array(like)
    with np.errstate(all="ignore"):
        match draw.randrange(6):
            case 0 if array.size:
                array.flat[draw.randrange(array.size)] = _cast(draw, array)
            case 1:
                array[...] = _cast(draw, array)
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


def _cast(draw: random.Random, array: np.ndarray) -> Any:
    number = draw.choice(NUMBERS)
    if array.dtype.kind == "f":
        return array.dtype.type(number)
    return int(number) if np.isfinite(number) and abs(number) < 2**63 else 0


def spoil_arrays(draw: random.Random, content: RecordDict) -> None:
    """Change an entry of a record of arrays, or the record."""
    names = [*content.array_records]
    if not names:
        return
    key = draw.choice(names)
    entries: dict[str, Array] = dict(content.array_records[key])
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
    names = [*content.metric_records]
    if not names:
        return
    key = draw.choice(names)
    metrics: dict[str, Any] = dict(content.metric_records[key])
    name = draw.choice([*metrics, *["num-examples"] * 3, "loss", draw.choice(TEXTS)])
    match draw.randrange(6):
        case 0:
            metrics.pop(name, None)
        case 1:
            metrics[name] = [draw.choice(NUMBERS), draw.choice(NUMBERS)]
        case 2:
            content["more"] = MetricRecord({"num-examples": 3})
        case 3:
            metrics[f"{draw.choice(TEXTS)}-num-examples"] = draw.choice(NUMBERS)
            metrics[f"{draw.choice(TEXTS)}-loss"] = draw.choice(NUMBERS)
        case _:
            metrics[name] = draw.choice(NUMBERS)
    content[key] = MetricRecord(
        {
            k: [float(x) for x in v] if isinstance(v, list) else v
            for k, v in metrics.items()
        }
    )


def spoil_names(draw: random.Random, content: RecordDict) -> None:
    """Change what the client code reports."""
    info: dict[str, Any] = dict(content.config_records.get("properties", {}))
    known = (
        *("partition-id", "site-name", "unusable", "refusal", "node-versions"),
        *("fedbn-flwr.hooks-applied", "fedbn-flwr.local-sha256"),
        *("fedbn-flwr.local-home", "fedbn-flwr.packs", "fedbn-flwr.synchronises"),
    )
    name = draw.choice([*info, *known, draw.choice(TEXTS)])
    value = draw.choice([*TEXTS, *NUMBERS, b"\xff", ["a"], [1, 2], True])
    info[name] = value
    content["properties"] = ConfigRecord(info)


@dataclass
class Said:
    """What the nodes have sent.

    Attributes:
        names: the names of the hostile node.
        lies: its lies.
        states: the state in a reply, by round and partition.
        counts: the counts in the reply and in the answer to the query, by partition.
    """

    names: set[str] = field(
        default_factory=lambda: {f"client {BAD}", f"partition {BAD}"}
    )
    lies: list[str] = field(default_factory=list)
    states: dict[tuple[Any, Any], Any] = field(default_factory=dict)
    counts: dict[Any, Any] = field(default_factory=dict)
    asked: dict[Any, Any] = field(default_factory=dict)

    def note(self, number: Any, partition: Any, kind: str, reply: Message) -> None:
        """Note the state and the count of a reply, if they can be read."""
        if reply.has_error() or kind not in (MessageType.TRAIN, MessageType.QUERY):
            return
        metrics = [*reply.content.metric_records.values()]
        counts = [one["num-examples"] for one in metrics if "num-examples" in one]
        if kind == MessageType.QUERY:
            self.asked[partition] = counts[-1] if counts else None
            return
        with suppress(Exception):
            self.states[number, partition] = from_record(reply.content["arrays"])
            self.counts[partition] = counts[0]


SPOILS = (*[spoil_arrays] * 4, *[spoil_metrics] * 3, *[spoil_names] * 2)


def hostile(
    client_fn: Callable[[Context], Any], seed: int, said: Said, often: str
) -> ClientApp:
    """Return the usual app, whose partition BAD sends drawn replies."""
    whole, app = client_app(client_fn), ClientApp()
    draw = random.Random(seed)
    kinds = {draw.choice(KINDS) for _ in range(draw.choice([1, 1, 2]))}
    if often and draw.random() < 0.5:
        kinds = {often}
    rounds = draw.choice([{1}, {2}, {1, 2, 3}])
    times = draw.choice([1, 1, 2])
    spoil = late if draw.random() < 0.01 else draw.choice([*SPOILS, fails, fails])

    def answer(message: Message, context: Context) -> Message:
        configs = [*message.content.config_records.values(), ConfigRecord()]
        server_round = configs[0].get("server-round")
        kind = message.metadata.message_type
        reply = whole(message, context)
        partition = context.node_config["partition-id"]
        lies = partition == BAD and kind in kinds and not reply.has_error()
        if lies and (server_round in rounds or kind == MessageType.QUERY):
            said.names.add(f"node {context.node_id}")
            said.lies.append(f"{spoil.__name__} of {kind} in round {server_round}")
            if spoil is fails:
                return fails(draw, message)
            if spoil is late:
                late()
            for _ in range(times):
                spoil(draw, reply.content)
        said.note(server_round, partition, kind, reply)
        return reply

    registers = [app.train(), app.evaluate(), app.query()]
    registers += [app.query("statistics"), app.query("exchange")]
    for register in registers:
        register(answer)
    return app


def late(*_: object) -> None:
    """Answer later than the round waits."""
    with interrupted():
        threading.Event().wait(TIMEOUT + 1)


def fails(draw: random.Random, message: Message) -> Message:
    """Raise an error, or reply with one."""
    text = draw.choice(TEXTS)
    if draw.random() < 0.5:
        raise RuntimeError(text)
    return Message(Error(draw.choice([0, 1, 7, 107, 999]), text), reply_to=message)


def network(dtype: torch.dtype) -> nn.Module:
    """Return a small network with seeded weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)]
        return nn.Sequential(*layers).to(dtype)


def data(dtype: torch.dtype) -> list[Points]:
    """Return the examples of the clients."""
    found = []
    for client, size in enumerate(SIZES):
        generator = torch.Generator().manual_seed(client)
        inputs = torch.randn(size, 5, generator=generator, dtype=torch.float64)
        targets = torch.randint(3, (size,), generator=generator)
        found.append(Points((inputs + client).to(dtype), targets))
    return found


class Lines(logging.Handler):
    """Collects the lines of the log."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        # Flower writes tracebacks of clients in several lines.
        if "fedbn_flwr" in record.pathname:
            self.texts.append(record.getMessage())


def check(method: str, seed: int) -> str:
    """Run a method over three nodes of which one is hostile, and check the law.

    The run ends with a model or with an error of the package, never with a traceback.
    An error, and a refusal, names the node. Each global model is the average of the
    honest replies, moved by the share of the hostile reply if it was used. The log has
    one line for each message.

    Returns:
        the outcome in a few words.
    """
    draw = random.Random(f"{method}-{seed}")
    dtype = draw.choice([torch.float32, torch.float64])
    said = Said()
    lines = Lines()
    logger = logging.getLogger("flwr")
    logger.addHandler(lines)
    training = LocalTraining(learning_rate=LearningRate(0.1), batch_size=4)
    strategy = METHODS[method](on_divergence=draw.choice(["stop", "continue"]))
    strategy.parts = split_state(network(dtype))
    clients = torch_clients(lambda: network(dtype), data(dtype), training)
    app = hostile(clients, seed, said, OFTEN.get(method, ""))
    error, run = None, None
    try:
        with ExitStack() as grids:
            run = run_strategy(
                grids,
                strategy,
                app,
                network(dtype).state_dict(),
                len(SIZES),
                rounds=ROUNDS,
                timeout=TIMEOUT,
                grid_options={"threads": 3},
            )
    except FedBNError as failure:
        error = failure
    finally:
        logger.removeHandler(lines)
    for text in lines.texts:
        assert len(text) <= LONGEST_LINE, f"a line of {len(text)}: {text[:300]}"
        assert text.isprintable(), f"control characters in {text[:500]!r}"
    if error is not None:
        text = str(error)
        assert said.lies, f"an honest run failed: {text}"
        assert any(name in text for name in said.names), f"does not name: {text[:900]}"
        return type(error).__name__
    return _check_models(method, strategy, run, dtype, said)


def _check_models(method: str, strategy: Any, run: Any, dtype: Any, said: Said) -> str:
    node_ids = run.grid.inner.get_node_ids()
    outcome = set()
    for report, before, after in zip(
        strategy.reports, run.history, run.history[1:], strict=False
    ):
        for name, array in after.items():
            assert np.isfinite(array).all(), f"entry {name} is not finite"
        if report.kept_previous:
            assert all(np.array_equal(after[k], before[k]) for k in before)
            outcome.add("kept")
            continue
        used = [i for i in report.participants if i in (0, 2)]
        # The hostile node may report another partition.
        used += [BAD] * (len(report.participants) - len(used))
        if BAD not in used and said.lies:
            outcome.add("refused")
            text = report.rejected.get(node_ids[BAD], "")
            # A node that says that it has no data is not asked.
            known = "node" in text or str(BAD) in report.missing
            assert known or report.asked < len(SIZES), report
        states, weights = {}, {}
        for i in used:
            states[i] = said.states[report.server_round, i]
            count = said.asked.get(i)
            known = isinstance(count, int) and count >= 0
            weights[i] = float(count if known else said.counts[i])
            if method == "scaffold":
                weights[i] = 1.0
        # A hostile model may be too large for the training of the others.
        assert {0, 2} <= {*used} or strategy.run.start.far_model, report.rejected
        outcome.add("used" if BAD in used else "")
        if method in AVERAGING:
            _within_weights(states, weights, before, after, method, dtype)
    return " ".join(sorted(outcome))


def _within_weights(
    states: Mapping[int, Any],
    weights: Mapping[int, float],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    method: str,
    dtype: Any,
) -> None:
    total = sum(weights.values())
    honest = {i: w for i, w in weights.items() if i != BAD}
    rough = 1e-5 if dtype == torch.float32 else 1e-10
    for name, value in after.items():
        if value.dtype.kind != "f" or any(name not in s for s in states.values()):
            continue
        wide = {i: s[name].astype(np.float64) for i, s in states.items()}
        if not honest:
            mean = before[name].astype(np.float64)
        else:
            mean = sum(w * wide[i] for i, w in honest.items()) / sum(honest.values())
        share = weights.get(BAD, 0.0) / total
        if "running" in name and method == "scaffold":
            continue
        own = np.abs(wide[BAD] - mean) if BAD in wide else 0.0
        most = share * own + rough * (1 + np.abs(mean) + share * own)
        moved = np.abs(value.astype(np.float64) - mean)
        assert (moved <= most).all(), (
            f"entry {name} moved by {moved.max()} instead of {np.max(most)}"
        )


def main(first: int, draws: int) -> int:
    """Check draws in a row, print each failure, and return their number."""
    identify_process(1)
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.INFO)
    for handler in logging.getLogger("flwr").handlers:
        handler.setLevel(logging.CRITICAL + 1)
    failures, outcomes = 0, dict[str, int]()
    for seed in range(first, first + draws):
        method = [*METHODS][seed % len(METHODS)]
        try:
            outcome = check(method, seed)
        except Exception as error:
            failures += 1
            kind, text = type(error).__name__, str(error)[:700]
            print(f"{method} {seed}: {kind}: {text}", flush=True)
            continue
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    print(f"{draws} draws, {failures} failures, {outcomes}")
    return failures


if __name__ == "__main__":
    sys.exit(bool(main(int(sys.argv[2] if len(sys.argv) > 2 else 0), int(sys.argv[1]))))
