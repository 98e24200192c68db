"""The interface of a method, a paper's algorithm: its declaration, its state and its
arithmetic. No Flower in it.

A method holds its settings and nothing else. Its state is a value: ``begin`` returns
the first one, ``aggregate`` the next one, and a checkpoint holds it.
``server.rounds.round`` calls the methods of a run through ``server.methods.together``.

The federated mean of two numbers, as a method::

    class Mean(Method):
        name = "mean"

    class Damped(Method):
        name = "damped"

        def travels(self, num_rounds=None):
            return (Travels(decides=frozenset({"server step"})),)

        def aggregate(self, state, facts, replies, model):
            damped = {name: (facts.before[name] + model[name]) / 2 for name in facts.parts.rest}
            return {**model, **damped}, state
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, Literal, NamedTuple

from torch import nn
from typing_extensions import TypeVar

from fedbn_flwr.batchnorm.averaging import State, to_shares, weighted_sum
from fedbn_flwr.batchnorm.parts import Parts, entry_name
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.messages.protocol import MessageConfig, ReplyInfo
from fedbn_flwr.server.methods.params import Params
from fedbn_flwr.server.methods.travels import Travels
from fedbn_flwr.training.client_hook import ClientHook
from fedbn_flwr.training.model_state import without_wrappers
from fedbn_flwr.transport import Reducer
from fedbn_flwr.transport.transports import connect

__all__ = [
    "ROLES",
    "Ask",
    "Facts",
    "HookContext",
    "HookFactory",
    "Method",
    "Node",
    "Problem",
    "Replies",
    "Reply",
    "Role",
]


@dataclass(frozen=True, slots=True)
class Node:
    """A client as the server knows it; None for what its app did not say.

    ``server.runs.nodes`` finds it out.

    Attributes:
        node_id: Flower's id.
        partition_id: the part of the data that it holds.
        num_examples: number of its training examples.
        batch_size: examples in its first local step.
        unusable: why it cannot take part; "" if it can.
        refusal: why a mod of its app has refused the query; "" if none has.
        behind_mod: whether that mod comes before ``bn_mod``, which would have
            answered all the same.
        num_partitions: number of the parts into which the data are split, if it holds
            one of them.
        failure: the error that its app, or a mod of it, raised in answer to the query;
            "" if none.
        packs: whether its app reads arrays in one piece.
    """

    node_id: int
    partition_id: int | None = None
    num_examples: int | None = None
    batch_size: int | None = None
    unusable: str = ""
    refusal: str = ""
    behind_mod: bool = False
    num_partitions: int | None = None
    failure: str = ""
    packs: bool = False

    @property
    def label(self) -> str:
        """The partition id; the node id if the partition id is unknown."""
        return str(self.node_id if self.partition_id is None else self.partition_id)

    @property
    def order(self) -> tuple[bool, int, int]:
        """Sorting key: by partition id, then nodes without one by node id."""
        return self.partition_id is None, self.partition_id or 0, self.node_id

    def __str__(self) -> str:
        """Return the name of the node in messages."""
        if self.partition_id is None:
            return f"node {self.node_id}"
        return f"node {self.node_id} (partition {self.partition_id})"


__all__ += ["Round", "RunSettings", "Size"]

Size = tuple[int, int]  # bytes of floats, and of others


@dataclass(frozen=True)
class Facts:
    """What a method knows of the run and of its round.

    Attributes:
        number: the round, counted from 1; 0 in ``begin``.
        num_rounds: R; None if Flower's own loop does not say it.
        parts: the split of the model's state.
        before: the global state that was sent; read-only.
        travels: the phase of the round: what travels in it, of all methods together.
        num_able: number of nodes with training data, N of the papers.
        most_able: the largest ``num_able`` of a round so far, used or not.
        known: labels of the clients that the server has met: they had training data in
            a round, used or not, or keep something.
    """

    number: int
    num_rounds: int | None
    parts: Parts
    before: State
    travels: Travels = field(default_factory=Travels)
    num_able: int = 0
    most_able: int = 0
    known: frozenset[str] = frozenset()

    @cached_property
    def frozen(self) -> tuple[str, ...]:
        """The entries that return as they were sent."""
        return self.parts.select(self.travels.frozen - self.travels.local)

    @cached_property
    def local(self) -> tuple[str, ...]:
        """The entries that stay with the clients."""
        return self.parts.select(self.travels.local)

    @property
    def shared(self) -> State:
        """The entries of ``before`` that do not stay with the clients."""
        local = set(self.local)
        return {name: array for name, array in self.before.items() if name not in local}

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the model's entries."""
        return {name: array.shape for name, array in self.before.items()}

    @cached_property
    def channel_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of ``PATH.alpha`` of each BN layer: a number for each channel."""
        shapes = {}
        for layer in self.parts.layers:
            mean = layer.entries.get("running_mean")
            if mean is not None:
                shapes[entry_name(layer.path, "alpha")] = self.before[mean].shape
        return shapes

    def with_frozen(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """Return the model with frozen entries as they were sent, bit for bit."""
        frozen = {name: self.before[name] for name in self.frozen}
        return {**model, **frozen}

    def total_rounds(self, setting: str) -> int:
        """Return the number of rounds, which a setting needs.

        ConfigError if Flower's loop does not say it.
        """
        if self.num_rounds is None:
            raise ConfigError(
                f"{setting} needs the number of rounds, which the strategy's own"
                " start() alone knows: give it as a round (int), not as a fraction; in"
                " Flower's legacy loop pass num_rounds= to to_legacy"
            )
        return self.num_rounds


@dataclass(frozen=True)
class Reply:
    """A usable reply.

    Attributes:
        node: the sender.
        num_examples: |D_i|, for the weight.
        state: the shared entries; read-only views of the message.
        metrics: metrics of the client's training.
        extras: further records that the method reads, by name; read-only as well.
        sizes: bytes of each record.
        info: what the client half reports.
    """

    node: Node
    num_examples: float
    state: State
    metrics: Mapping[str, float]
    extras: Mapping[str, State] = field(default_factory=dict)
    sizes: Sequence[Size] = ()
    info: ReplyInfo = field(default_factory=ReplyInfo)


class Replies(Sequence[Reply]):
    """The replies that a round uses, in the order of partition ids.

    Args:
        replies: the replies.
        weighted_by: what weighs them (``Travels.weights``).

    Attributes:
        weights: a weight >= 0 for each reply; the weights p_i are these, normalised.
            Losses that are all zero weigh the same.
    """

    def __init__(self, replies: Sequence[Reply], weighted_by: str = "examples") -> None:
        self._replies = tuple(replies)
        if weighted_by == "examples":
            weights = [reply.num_examples for reply in replies]
        elif weighted_by == "equal":
            weights = [1.0] * len(replies)
        else:
            weights = [reply.metrics[weighted_by] for reply in replies]
            # losses that are all 0 have no shares
            if not any(weights):
                weights = [1.0] * len(replies)
        self.weights: list[float] = weights

    def average_of(self, key: str, weights: Sequence[float]) -> dict[str, Any]:
        """Return the average of a record, each entry over the replies that have it."""
        records = [reply.extras.get(key, {}) for reply in self]
        names = dict.fromkeys(name for record in records for name in record)
        averaged = {}
        for name in names:
            arrays, own_weights = [], []
            # A client may lack an entry: a frozen layer has no momentum, say.
            for record, weight in zip(records, weights, strict=True):
                if name in record:
                    arrays.append(record[name])
                    own_weights.append(weight)
            mean = weighted_sum(arrays, to_shares(own_weights))
            averaged[name] = mean.astype(arrays[0].dtype)
        return averaged

    def mean_of(self, metric: str) -> float:
        """Return the mean of a metric with the weights p_i."""
        shares = to_shares(self.weights)
        values = [reply.metrics[metric] for reply in self]
        return sum(p * value for p, value in zip(shares, values, strict=True))

    def __getitem__(self, index: Any) -> Any:
        """Return a reply, or a tuple of them."""
        return self._replies[index]

    def __len__(self) -> int:
        """Return the number of replies."""
        return len(self._replies)


@dataclass(frozen=True)
class RunSettings:
    """What ``problems`` knows of a run besides the method's ``Params``.

    The server of a Flower project does not know the clients' training: then a field has
    its default.

    Attributes:
        num_rounds: R; 0 = not known.
        norm: the normalisation of the model; "" = not known.
        sgd_momentum: momentum of the clients' SGD; None = not known.
        tests: the tests of ``eval-on`` (``tests_in``).
        optimizer: the clients' optimizer; "" = not known.
        parts: the split of the model's state; None = no model is known, and nothing is
            said of it.
        shapes: the shapes of the model's entries.
        local_steps: the clients' steps in a round; 0 = not known, or not the same for
            all.
    """

    num_rounds: int
    norm: str = ""
    sgd_momentum: float | None = None
    tests: tuple[str, ...] = ()
    optimizer: str = ""
    parts: Parts | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    local_steps: int = 0
    at: ClassVar[str] = "run"


@dataclass(frozen=True)
class Round:
    """What a row of a method's table sees of a round.

    Attributes:
        at: "sending" = before its messages, "replies" = before its replies are used,
            "diverged" = its loss is not finite.
        number: the round.
        state: the method's state after the round before; "diverged": after the round.
        facts: the round; None when it has diverged.
        replies: the usable replies.
    """

    at: str
    number: int
    state: Any
    facts: Any = None
    replies: Sequence[Reply] = ()


class Problem(NamedTuple):
    """What is wrong with a method's settings, or what a user may not expect of them.

    As a row of a method's table it has ``when``, and its texts are templates with the
    names ``method``, ``params``, ``run`` or ``round`` (what ``when`` sees) and
    ``found`` (what ``when`` returned).

    Attributes:
        code: its name, for programs.
        text: a sentence with the names of the config keys; of an unused setting what it
            needs; of a model what needs what.
        kind: "refuse" = the run is refused, "nothing-trained" = it ends, as no round
            has changed what it needs, "warn" = a warning, "unused" = the setting has no
            effect, "model" = the model does not fit. Of a loss that is not finite:
            "cause" = the likely one, "remedy" = a further one.
        key: the setting, with ``_``.
        has: what the model has; "" = no BatchNorm.
        remedy: which model or method to use.
        at: when the row is looked at: "run" = before a run, or see ``Round.at``.
        when: called with the method and a ``RunSettings`` or a ``Round``: whether they
            have the problem.
    """

    code: str
    text: str
    kind: Literal[
        "refuse", "nothing-trained", "warn", "unused", "model", "cause", "remedy"
    ] = "refuse"
    key: str = ""
    has: str = ""
    remedy: str = ""
    at: Literal["run", "sending", "replies", "diverged"] = "run"
    when: Callable[[Any, Any], object] | None = None


class Ask(NamedTuple):
    """A client hook of a round.

    Attributes:
        hook: its name in ``client_hooks``.
        config: the config entries that its clients get.
        sends: the records that go down besides the model, by key; ``travels`` declares
            each.
        shown: whether the reply need not name the hook as applied: it shows the effect,
            or a client may leave it out.
        tunes: whether the hook acts in the training before a test (``fine_tune``), too:
            it belongs to the client's own steps, and needs no record of the server's.
    """

    hook: str
    config: Mapping[Any, Any] = {}
    sends: Mapping[Any, State] = {}
    shown: bool = False
    tunes: bool = False


@dataclass(frozen=True)
class HookContext:
    """The input of a ``HookFactory``.

    Attributes:
        config: the config of the training message; the keys of a method are declared in
            its file.
        local_entries: names of the entries that stay with this client.
        replayed: the reducer of a synchronised step by messages; None otherwise.
        validation_loss: returns the loss of a model on the client's validation data;
            None if the training is a loop of another project. It raises DataError if
            the client has none.
        train: trains a model as the client's, with ``hooks``; None in a loop of another
            project.
        num_steps: the steps of the client's training; 0 = not known, as in a loop of
            another project.
    """

    config: Mapping[str, Any]
    local_entries: frozenset[str] = frozenset()
    replayed: Reducer | None = None
    validation_loss: Callable[[nn.Module], float] | None = None
    train: Callable[..., object] | None = None
    num_steps: int = 0

    @property
    def reducer(self) -> Reducer:
        """The reducer of a synchronised step; a channel is opened here."""
        return connect(self.config) if self.replayed is None else self.replayed

    @property
    def layers(self) -> tuple[str, ...]:
        """The paths of the BatchNorm layers on which the method acts; () = all."""
        return MessageConfig.read(self.config).layers

    @property
    def personal(self) -> frozenset[str]:
        """The names of ``MessageConfig.personal``, without a wrapper's prefix."""
        names = MessageConfig.read(self.config).personal
        return frozenset(map(without_wrappers, names))


HookFactory = Callable[[HookContext], ClientHook]
ROLES = ("local-part", "client-hooks", "server-step")
"""What a method may add to another one; each is a config key."""
Role = Literal["", "local-part", "client-hooks", "server-step", "option"]
P = TypeVar("P", bound=Params, default=Params)
S = TypeVar("S", default=None)


class Method(Generic[P, S]):
    """A method. Here every part is FedAvg's; a method overrides what its paper changes.

    Attributes:
        name: the name in configs and messages.
        summary_line: the description in the tables.
        source: the paper.
        role: what the method adds to another one, and the config key for it; "" = it is
            not combined with others.
        alone: why the method is not combined with others: then it has no role, whatever
            its base has.
        instead: what to use where the method does not fit.
        Params: the class of the settings; its fields are constructor arguments of the
            strategy.
        State: the class of the state; its fields are attributes of the strategy, also
            before a run. None = it is no dataclass, or there is none.
        client_hooks: factories of the client hooks, by name.
        ignored: arguments of Flower's own strategy of this method that have no effect,
            and why.
        params: the settings.
    """

    name: ClassVar[str]
    summary_line: ClassVar[str] = ""
    source: ClassVar[str] = ""
    role: ClassVar[Role] = ""
    alone: ClassVar[str] = ""
    instead: ClassVar[str] = "FedAvg"
    Params: ClassVar[type[Any]] = Params
    State: ClassVar[type[Any] | None] = None
    client_hooks: ClassVar[Mapping[str, HookFactory]] = {}
    ignored: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Take away the role of a base that is combined with others."""
        super().__init_subclass__(**kwargs)
        if cls.alone:
            cls.role = ""

    def __init__(self, params: P) -> None:
        self.params = params

    @property
    def title(self) -> str:
        """The method's name in messages."""
        return self.name if self.role == "option" else f"strategy {self.name!r}"

    def travels(self, num_rounds: int | None = None) -> tuple[Travels, ...]:
        """Return what travels, in each phase of the method.

        ``num_rounds``: R, for the last rounds of phases.
        """
        return (Travels(),)

    def begin(self, facts: Facts) -> S:
        """Return the state before round 1: a ``State`` with the defaults of its fields.

        Raises:
            ConfigError: a setting does not fit the run.
        """
        return self.State() if self.State else None  # type: ignore[return-value]

    def phase(self, state: S, number: int) -> str:
        """Return the name of the round's phase, one of ``travels``."""
        return self.travels()[0].phase

    def on_clients(self, state: S, facts: Facts) -> list[Ask]:
        """Return the client hooks of the round, in order."""
        return []

    def aggregate(
        self, state: S, facts: Facts, replies: Replies, model: dict[str, Any]
    ) -> tuple[dict[str, Any], S]:
        """Return the new global state, and the method's state after the round.

        Args:
            state: the state after the last round.
            facts: the round.
            replies: the usable replies, in the order of partition ids, and their
                weights; their arrays are read-only.
            model: the average of the replies with the weights p_i, and frozen entries
                as they were sent; a new dict.
        """
        return model, state

    def table(self) -> Sequence[Problem]:
        """Return the rows of what may be wrong, which end a method's file."""
        return ()

    def found(self, seen: RunSettings | Round) -> Iterator[Problem]:
        """Yield the problems of the table that a run, or a round, has."""
        for row in self.table():
            # Each sees values of its own kind: a row of a round has no run to look at.
            if row.when is None or row.at != seen.at:
                continue
            found = row.when(self, seen)
            if not found:
                continue
            names = {"method": self, "params": self.params, "found": found}
            # One value by the name that fits the row.
            names |= {"run": seen, "round": seen}
            yield row._replace(
                text=row.text.format(**names),
                has=row.has.format(**names),
                remedy=row.remedy.format(**names),
                when=None,
            )

    def problems(self, run: RunSettings) -> Iterable[Problem]:
        """Return, or yield, what does not fit, or has no effect, in such a run."""
        return self.found(run)

    def advice(self, state: S, number: int, known: list[str]) -> list[str]:
        """Return why a loss is not finite in this round, and what to do.

        ``known``: what the other methods say.
        """
        for problem in self.found(Round("diverged", number, state)):
            if problem.kind == "cause":
                known = [problem.text, *known[1:]]
            else:
                known = [*known, problem.text]
        return known

    def outcome(self, state: S, num_rounds: int) -> dict[str, Any]:
        """Return what the summary says of the method after so many rounds, by key."""
        return {}
