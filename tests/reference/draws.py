"""Cases of the reference, with a value on each axis, and lawful combinations.

The first choice of each axis is the default. A failing draw shrinks towards the
defaults, and ``repr`` shows only values that differ from them.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st
from torch.nn.modules.batchnorm import _BatchNorm

from tests.reference.federation import LOST, UNMEASURED
from tests.reference.networks import NETWORKS

LOCAL = ("fedbn", "silobn", "mtfl")
STEPS = ("fedadam", "fedavgm", "fedyogi", "fedadagrad", "fednova")
ALONE = ("standalone", "feddna", "fedbs", "fedwon", "hbn")
LOOPS = ("loop", "two-optimizers", "closure", "around", "named")
STATISTICS = ("fixbn", "staticbn", "fedtan", "fedtan2")
KEEPS = {
    "layers": LOCAL,
    "head": ("fedrep",),
    "model": ("ditto", "standalone"),
    "state": ("scaffold", "hbn"),
}
MOVES = {
    "measured": ("staticbn",),
    "common": ("fedtan", "fedtan2"),
    "fixed": ("fixbn",),
    "mixed": ("hbn",),
}
"""The kinds of methods by what a client keeps, and by what moves the statistics."""
TOGETHER = (STATISTICS, LOCAL, STEPS, ("fedprox",), ("scaffold",), ("fedrep", "ditto"))
"""At most one method of each group."""
APART = {
    "fedbn": STATISTICS,
    "silobn": STATISTICS,
    "mtfl": ("fedtan", "fedtan2", "staticbn"),
    "scaffold": (*STEPS, "fedtan", "fedtan2"),
    "fedrep": ("staticbn",),
}
"""The methods that cannot be combined with a method."""
SPLIT = {
    "mlp": "norm.weight,head",
    "cumulative": "b,head",
    "no-affine": "b.bias,head",
    "buffers": "norm,head",
}
"""The part that trains, by model. A layer may be fixed, or train in half."""
SIZES = ("sizes", "rounds", "batch_size", "steps", "resumed_after", "head_steps")
EVENTS = ("hidden", "faults")


@dataclass(frozen=True)
class Case:
    """One federation."""

    methods: tuple[str, ...] = ()
    model: str = "mlp"
    dtype: str = "float64"
    sizes: tuple[int, ...] = (6, 9, 5)
    rounds: int = 2
    # clients
    fraction: float = 1.0
    hidden: tuple[tuple[int, int], ...] = ()
    faults: tuple[tuple[int, int, str], ...] = ()
    min_replies: int = 1
    # training
    batch_size: int = 0
    steps: int = 2
    sampling: str = "with-replacement"
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    decay: str = ""
    # options and settings of methods
    personal: str = ""
    trains: str = ""
    layers: bool = False
    momentum_scope: str = "none"
    agc: float = 0.0
    variance: str = "mean"
    recalibrate: bool = False
    eval_on: str = ""
    eval_every: int = 1
    fine_tune: int = 0
    head_steps: int = 1
    statistics_warm_up: int = 1
    freeze_affine: bool = False
    freeze_auto: bool = False
    exchanges: str = "3L+1"
    # ways to run
    way: str = "torch-client"
    engine: str = "process"
    data: str = "in-memory"
    built: bool = False  # a TorchClient gets the function, not a model
    transport: str = "messages"
    again: str = ""
    resumed_after: int = 1
    folder: bool = False
    seed: int = 3

    def __repr__(self) -> str:
        shown = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                shown.append(f"{field.name}={value!r}")
        return f"Case({', '.join(shown)})"

    def has(self, *names: str) -> bool:
        return bool({*names} & {*self.methods})

    def tests_after(self, t: int) -> bool:
        """Return whether there is a test after a round."""
        return bool(t) and (t % self.eval_every == 0 or t == self.rounds)

    @property
    def client_seed(self) -> int:
        """Return the seed of the clients' batches.

        A config has one seed for everything.
        """
        return self.seed if self.way == "command" else self.seed + 4

    @property
    def in_loop(self) -> bool:
        return self.way in LOOPS

    @property
    def refused_by_all(self) -> bool:
        """Return whether every client refuses, because no step is left for the body."""
        return self.has("fedrep") and 0 < self.steps <= self.head_steps

    @property
    def own_weights(self) -> bool:
        """Return whether weights stay with the clients."""
        return bool(self.personal) or self.has("fedbn", "mtfl", "standalone", "fedrep")

    @property
    def measures_own_models(self) -> bool:
        """Return whether clients measure the statistics of their own models."""
        return self.recalibrate and (self.own_weights or self.has("silobn", "ditto"))

    @property
    def synchronised(self) -> bool:
        return self.has("fedtan", "fedtan2", "feddna")


def refusal(case: Case) -> str:
    """Return the reason to refuse the case before round 1, or an empty text."""
    personal = bool(case.personal) or case.has("fedrep")
    without = case.model in ("no-norm", "wsconv")
    needs = case.recalibrate or case.has(*LOCAL, *STATISTICS, "feddna", "hbn")
    if without and needs:
        return "the model has no BatchNorm"
    if without and case.layers:
        return "the model has no such layer"
    if case.personal == "first" and case.model in ("tied", "equal-channels"):
        return "there is no such entry"
    if case.trains and case.personal == "first":
        return "a personal entry does not train"
    if case.trains and personal and case.has("fedbn") and case.model != "buffers":
        return "nothing that trains is shared"
    if case.personal == "encoder":
        return "one of two names of a tied weight"
    if case.has("staticbn") and case.own_weights:
        return "no global weights to measure under"
    if case.eval_on == "averaged-bn" and not (case.has(*LOCAL) or personal):
        return "no entries stay with the clients"
    of_clients = case.way == "command" or case.eval_on != "averaged-bn"
    if case.fine_tune and not of_clients:
        return "fine-tuning is for tests of the clients"
    lacks = case.model if case.layers else ""
    freezes_affine = case.has("fixbn") and case.freeze_affine
    if lacks == "no-affine" and (case.has("mtfl") or freezes_affine):
        return "the layer has no gamma and beta"
    measures = case.recalibrate or case.has("silobn", "fixbn", "staticbn", "hbn")
    if lacks == "no-statistics" and measures:
        return "the layer has no statistics"
    of_files = case.way == "command" and case.dtype == "float64"
    if case.model == "complex" and of_files:
        return "safetensors has no complex128"
    known = case.way == "command" and case.steps
    if case.has("fedrep") and known and case.steps <= case.head_steps:
        return "no step is left for the body"
    if case.has("ditto", "hbn") and case.way in LOOPS:
        return "a second model, or a pass before the training, needs a TorchClient"
    return ""


@st.composite
def cases(draw: Any) -> Case:
    """Draw a case with choices that make sense together."""
    return _case(lambda *values: draw(st.sampled_from(values)))


def drawn(draws: int) -> list[Case]:
    """Return random cases that train."""
    choice = random.Random(0).choice
    cases = {_case(lambda *values: choice(values)): None for _ in range(draws)}
    return [case for case in cases if not refusal(case) and not case.refused_by_all]


def crossing(draws: int, count: int) -> list[Case]:
    """Return the random cases with the most crossings, each time those that are new.

    A crossing is a pair of any settings, or a triple of kinds, which counts three times.
    """
    cases = drawn(draws)
    crossings = [{*_pairs(case), *_triples(case)} for case in cases]
    chosen, seen = [], set()

    def left(i: int) -> tuple[int, int]:
        """Return minus the worth of the case now; it never grows."""
        new = crossings[i] - seen
        return -sum(1 if len(one) == 2 else 3 for one in new), i

    queue = [left(i) for i in range(len(cases))]
    heapq.heapify(queue)
    while len(chosen) < count:
        i = queue[0][1]
        if queue[0] == left(i):
            chosen.append(cases[i])
            seen |= crossings[i]
        heapq.heapreplace(queue, left(i))
    return chosen


def covering(draws: int) -> list[Case]:
    """Return few of these random cases with each pair of settings that they have.

    The first cases have most of the pairs.
    """
    having = {}
    for case in drawn(draws):
        for pair in _pairs(case):
            having.setdefault(pair, []).append(case)
    chosen, left = [], dict(sorted(having.items(), key=lambda item: len(item[1])))
    while left:
        some = next(iter(left.values()))[:20]
        best = max(some, key=lambda case: sum(pair in left for pair in _pairs(case)))
        chosen.append(best)
        for pair in _pairs(best):
            left.pop(pair, None)
    of_case = {case: set(_pairs(case)) for case in chosen}
    ordered, new = [], set(having)
    while of_case:
        ordered.append(max(of_case, key=lambda case: len(of_case[case] & new)))
        new -= of_case.pop(ordered[-1])
    return ordered


def _pairs(case: Case) -> Iterator[tuple]:
    """Yield each pair of settings that are not the defaults."""
    values = [("methods", name) for name in case.methods]
    for field in dataclasses.fields(case)[1:]:
        value = getattr(case, field.name)
        if value != field.default and field.name not in SIZES:
            values.append((field.name, value if field.name not in EVENTS else True))
    return itertools.combinations(values, 2)


def _triples(case: Case) -> Iterator[tuple]:
    """Yield each triple of kinds of a way, a kept part, an event, layers, statistics.

    An event counts if there are rounds before and after it, and a fault if its client
    is asked.
    """
    between = range(2, case.rounds)
    asked = [one for one in case.faults if (*one[:2],) not in case.hidden]
    asked = [one for one in asked if case.fraction == 1 or one[2] == UNMEASURED]
    events = {kind for r, _, kind in asked if r in between}
    kinds = {
        "way": {case.engine, "loop" if case.in_loop else case.way},
        "keeps": {kind for kind, names in KEEPS.items() if case.has(*names)},
        "event": {"fault" for kind in events if kind in ("raise", "nan")}
        | {"lost" for kind in events if kind in LOST}
        | {kind for kind in events if kind == UNMEASURED}
        | {"hidden" for r, _ in case.hidden if r in between}
        | {f"{case.again} from folders" if case.folder else case.again},
        "layers": {case.layers and _num_layers(case.model) > 1},
        "statistics": {kind for kind, names in MOVES.items() if case.has(*names)}
        | {case.eval_on},
    }
    if case.personal:
        kinds["keeps"].add("head")
    if case.momentum_scope == "local":
        kinds["keeps"].add("state")
    if case.recalibrate:
        kinds["statistics"].add("measured")
    for names in itertools.combinations(kinds, 3):
        for three in itertools.product(
            *(sorted(filter(None, kinds[n])) for n in names)
        ):
            yield *names, *three


@functools.cache
def _num_layers(model: str) -> int:
    return sum(isinstance(one, _BatchNorm) for one in NETWORKS[model]().modules())


def _case(one: Callable) -> Case:
    """Return a case whose values are chosen by ``one(*values)``."""

    def some(value: Any, *more: Any):
        """Draw any value in half of the cases, otherwise the default."""
        return one(value, *more) if one(False, True) else value

    # The first method is drawn evenly, and the others only if they fit it.
    methods = [one("", *itertools.chain(*TOGETHER), *ALONE)]
    if methods[0] not in ALONE:
        methods += [some("", *group) for group in TOGETHER if methods[0] not in group]
    case = SimpleNamespace(**vars(Case()))
    case.methods = lawful([m for m in methods if m])
    has = {*case.methods}
    case.model = some("mlp", *NETWORKS)
    if "fedwon" in has or case.model == "convolved":
        case.model = "wsconv"
    case.dtype = one("float64", "float64", "float64", "float32")
    case.sizes = one((6, 9, 5), (8, 3, 7, 5), (6, 1, 7), (4, 6))
    case.rounds = one(2, 3, 4)
    clients = range(len(case.sizes))
    rounds = range(1, case.rounds + 1)
    case.fraction = some(1.0, 0.5, 0.7)
    if one(False, True):
        away = {(one(*rounds), one(*clients)) for _ in range(one(0, 1, 2))}
        hidden = tuple(sorted(away))
        # somebody is there in each round
        if all(sum(r == t for r, _ in hidden) < len(clients) - 1 for t in rounds):
            case.hidden = hidden
        r, i, kind = one(*rounds), one(*clients), one("raise", "nan", *LOST)
        case.faults = some((), ((r, i, kind),))
        case.min_replies = some(1, 2, 3)
    case.batch_size, case.steps = one(0, 3, 4), one(2, 1, 3, 0)
    case.sampling = some("with-replacement", "without-replacement")
    if not has & {"scaffold"}:
        if "fednova" not in has:
            case.optimizer = some("sgd", "adam", "adamw")
        if case.optimizer == "sgd":
            case.momentum = some(0.0, 0.9)
            if case.momentum and "fednova" not in has:
                case.momentum_scope = some("none", "local", "global")
    case.weight_decay = some(0.0, 0.01)
    if "ditto" in has and case.model == "unused" and not case.weight_decay:
        # The gradient of the unused layer is the rounding of an average of equal
        # weights, and Adam makes a whole step of it.
        case.optimizer = "sgd"
    freezes = bool(has & {"fixbn", "fedtan2"})
    case.decay = some("", "round", *(["freeze"] if freezes else []))
    if not has & {"standalone", "fedrep"}:
        case.personal = some("", "head", "first", "last-layer")
        if case.model == "tied":
            case.personal = some("", "head", "encoder")
    of_all_layers = has & {"fedtan", "fedtan2"}
    if has & {*LOCAL, "fixbn", "staticbn", "hbn"} and not of_all_layers:
        case.layers = some(False, True)
    if case.model in SPLIT and case.personal != "first":
        case.trains = some("", "norms,head", SPLIT[case.model])
        if case.trains:
            case.layers = False
    case.agc = 0.1 if "fedwon" in has else some(0.0, 0.05)
    # With ``layers``, the server averages the variances of the other layers.
    own = {"fedbn", "silobn", "staticbn", "hbn"} if not case.layers else set()
    if not has & {"standalone", *own}:
        case.variance = some("mean", "pooled")
    if not has & {"staticbn"}:
        case.recalibrate = some(False, True)
    asks = case.recalibrate or "staticbn" in has
    # Somebody must answer, besides a client of one example.
    if asks and not case.hidden and min(case.sizes) > 1:
        lost = (one(*rounds), one(*clients), UNMEASURED)
        places = [place for *place, _ in case.faults]
        if one(False, True) and [*lost[:2]] not in places:
            case.faults += (lost,)
    case.eval_on = some("", "averaged-bn")
    case.fine_tune = some(0, 2)
    case.eval_every = some(1, 2)
    if "fedrep" in has:
        case.head_steps = one(1, 0, 2)
    if "hbn" in has:
        case.statistics_warm_up = one(1, 0, 2)
    if "fixbn" in has:
        case.freeze_affine = some(False, True)
        case.freeze_auto = some(False, True) and case.rounds > 2
    if has & {"fedtan", "fedtan2", "feddna"}:
        case.exchanges = some("3L+1", "2L+1")
        case.transport = some("messages", "barrier", "channel")
    case.data = some("in-memory", "one-file")
    case.built = some(False, True)
    case.again = some("", "second-run", "resume")
    if case.again == "resume":
        case.resumed_after = one(*rounds[:-1])
    case.folder = one(False, True)
    if one(False, True):
        vars(case).update(_way(one, case))
    return Case(**vars(case))


def _way(one: Callable, case: SimpleNamespace) -> dict:
    """Draw another way to run than TorchClients in one process, and its limits."""
    has, rare = {*case.methods}, one(*range(10))
    if rare == 9:
        return {"engine": "workers"}
    # The adaptive server optimizers and FedBS have settings without a key.
    only_python = {"fedwon", "fedadam", "fedyogi", "fedadagrad", "fedbs"}
    if rare == 8 and len(has) < 2 and not has & only_python:
        changed = {"way": "command", "hidden": (), "faults": (), "again": ""}
        changed["folder"] = False
        changed["transport"] = "messages"
        if case.model == "wsconv":
            changed["model"] = "mlp"
        # The server cannot test a site of one example by the batch's statistics.
        if case.model == "no-statistics":
            changed["sizes"] = (6, 9, 5)
        # The command has no key for these.
        changed |= {"sampling": "with-replacement", "exchanges": "3L+1"}
        changed["min_replies"] = 1
        if "standalone" in has:
            changed["eval_on"] = ""
        return changed
    if rare >= 7:
        measured = has & {"staticbn", "fedtan", "fedtan2", "feddna"}
        if measured or case.recalibrate or case.trains:
            return {}
        return {"way": "legacy", "hidden": (), "again": "", "folder": False}
    # A pass before the training needs a TorchClient.
    if rare == 6 or "hbn" in has:
        plain = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0}
        return {"way": "own-loop", "momentum_scope": "none", **plain}
    # The loop does not drop a batch of one example, and has no second model. It does not
    # change a client's own model before a test.
    changed = {"way": one(*LOOPS), "sizes": (6, 9, 12), "fine_tune": 0}
    changed["batch_size"] = case.batch_size and 3
    changed["methods"] = tuple(name for name in case.methods if name != "ditto")
    if Case(**vars(case) | changed).measures_own_models:
        changed["recalibrate"] = False
    if case.faults or case.hidden:
        changed["hidden"] = tuple((r, i) for r, i in case.hidden if i < 3)
        changed["faults"] = tuple(one for one in case.faults if one[1] < 3)
    if changed["way"] == "named" and has & {"fedtan", "fedtan2", "feddna"}:
        changed["way"] = "loop"  # a common step has its own messages
    # The loop calls ``model.train()``, even for a layer that was built in eval mode.
    if case.model == "in-eval":
        changed["model"] = "mlp"
    return changed


def lawful(methods: list[str]) -> tuple[str, ...]:
    """Leave out methods that cannot be combined with those before them."""
    chosen = []
    for name in methods:
        if not any(_apart(name, other) or _apart(other, name) for other in chosen):
            chosen.append(name)
    return tuple(chosen)


def _apart(name: str, other: str) -> bool:
    return other in APART.get(name, ())
