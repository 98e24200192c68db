"""The interface of a method, with a paper's declaration, state and arithmetic.

This module calls nothing of Flower. A method contains only its settings. Its state is a
value: ``begin`` returns the first state, ``aggregate`` returns the next one, and a
checkpoint contains it. ``server.rounds.round`` calls the methods of a run through
``server.methods.together``.

Two methods, the federated mean and a mean that only moves half of the way::

    class Mean(Method):
        name = "mean"

    class Damped(Method):
        name = "damped"

        def phases(self):
            return (Phase(decides=frozenset({"server step"})),)

        def aggregate(self, state, facts, replies, model):
            damped = {name: (facts.before[name] + model[name]) / 2 for name in facts.stepped}
            return {**model, **damped}, state
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Generic, Literal, NamedTuple

from typing_extensions import TypeVar

from fedbn_flwr.batchnorm.array_types import Array, State
from fedbn_flwr.batchnorm.averaging import to_shares, weighted_sum
from fedbn_flwr.batchnorm.parts import Parts
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.messages.protocol import ReplyInfo
from fedbn_flwr.messages.site_names import with_name
from fedbn_flwr.problems import Problem
from fedbn_flwr.server.methods.params import Params
from fedbn_flwr.server.methods.phases import ALL, Phase, together
from fedbn_flwr.transport.hook_context import HookFactory

__all__ = [
    "ROLES",
    "Ask",
    "Facts",
    "Freed",
    "Method",
    "Node",
    "Replies",
    "Reply",
    "Role",
    "far_from_others",
]


@dataclass(frozen=True, slots=True)
class Node:
    """A client as the server sees it. None means that its app did not report a value.

    ``server.runs.nodes`` collects the values.

    Attributes:
        node_id: Flower's id.
        partition_id: the partition of the data that the node has.
        num_examples: number of its training examples.
        batch_size: examples in its first local step.
        unusable: the reason why it cannot take part; empty if it can.
        refusal: the reason why a mod of its app refused the query; empty if none did.
        behind_mod: whether the mod that refused comes before ``bn_mod``. A mod after
            ``bn_mod`` only sets ``refusal``, because ``bn_mod`` answers instead.
        num_partitions: number of partitions of the data, if the node has one of them.
        failure: the error that its app, or a mod of its app, raised for the query;
            empty if there was none.
        packs: whether its app reads arrays in one piece.
        name: the name of its site, for texts only; "" without one.
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
    name: str = ""

    @property
    def label(self) -> str:
        """The partition id, or the node id if the partition id is unknown."""
        return str(self.node_id if self.partition_id is None else self.partition_id)

    @property
    def named_label(self) -> str:
        """The label with the name of the site, for messages."""
        return with_name(self.label, self.name)

    @property
    def order(self) -> tuple[bool, int, int]:
        """Sorting key by partition id. Nodes without one come last, by node id."""
        return self.partition_id is None, self.partition_id or 0, self.node_id

    def __lt__(self, other: Node) -> bool:
        """Return whether this node comes first when nodes are sorted."""
        return self.order < other.order

    def __str__(self) -> str:
        """Return the name of the node in messages."""
        about = [] if self.partition_id is None else [f"partition {self.partition_id}"]
        about += [self.name] if self.name else []
        return f"node {self.node_id}" + (f" ({', '.join(about)})" if about else "")


Size = tuple[int, int]  # bytes of floats, and bytes of other arrays


@dataclass(frozen=True)
class Facts:
    """The facts about a run and its round that a method receives.

    Attributes:
        number: the round, counted from 1; 0 in ``begin``.
        num_rounds: R; None if Flower's own loop does not report it.
        parts: the split of the model's state.
        before: the global state that was sent; read-only.
        phase: the declaration of the round's phase, merged from all methods.
        num_able: number of nodes with training data; N in the papers.
        most_able: the largest ``num_able`` so far, including unused rounds.
        known: labels of the clients that the server has met: they had training data in
            some round, used or not, or have local state.
    """

    number: int
    num_rounds: int | None
    parts: Parts
    before: State
    phase: Phase = field(default_factory=Phase)
    num_able: int = 0
    most_able: int = 0
    known: frozenset[str] = frozenset()

    @cached_property
    def frozen(self) -> tuple[str, ...]:
        """The entries that the clients return unchanged."""
        return self.parts.select(self.phase.frozen - self.phase.local)

    @cached_property
    def local(self) -> tuple[str, ...]:
        """The entries that stay with the clients."""
        return self.parts.select(self.phase.local)

    @cached_property
    def shared(self) -> State:
        """The entries of ``before`` that each reply to a training message has."""
        stay = self.parts.fixed.union(self.local)
        return {name: array for name, array in self.before.items() if name not in stay}

    @cached_property
    def stepped(self) -> tuple[str, ...]:
        """The floating entries that a server step changes.

        These are the shared entries that are neither frozen nor buffers.
        """
        averaged = self.parts.buffers.union(self.parts.whole.statistics, self.frozen)
        names = []
        for name, array in self.shared.items():
            if name not in averaged and array.dtype.kind in "fc":
                names.append(name)
        return tuple(names)

    def total_rounds(self, setting: str) -> int:
        """Return the number of rounds, because a setting needs it.

        Raises:
            ConfigError: Flower's loop does not report the number.
        """
        if self.num_rounds is None:
            raise ConfigError(
                f"{setting} needs the number of rounds, but only the strategy's own"
                " start() reports it. Write a round (int) instead of a fraction, or pass"
                " num_rounds= to to_legacy in Flower's legacy loop."
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
        info: the report of the client code.
        norm: the norm of all arrays.
        norm_of_weights: the norm of the entries that an optimizer trains.
    """

    node: Node
    num_examples: float
    state: State
    metrics: Mapping[str, float]
    extras: Mapping[str, State] = field(default_factory=dict)
    sizes: Sequence[Size] = ()
    info: ReplyInfo = field(default_factory=ReplyInfo)
    norm: float = 0.0
    norm_of_weights: float = 0.0


class Freed(Mapping[str, Array]):
    """The entries of a reply, of which those without a declaration are freed (None)."""

    def __init__(self, entries: Mapping[str, Array | None]) -> None:
        self._entries = entries

    def __getitem__(self, name: str) -> Array:
        """Return an entry.

        Raises:
            ConfigError: the entry is freed.
        """
        array = self._entries[name]
        if array is None:
            raise ConfigError(
                f"aggregate() reads entry {name!r} of single replies, but no method"
                " declares it. Add the part of the entry to each= of a Phase in phases()"
            )
        return array

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of all entries."""
        return iter(self._entries)

    def __len__(self) -> int:
        """Return the number of all entries."""
        return len(self._entries)


class Replies(tuple[Reply, ...]):
    """The replies that a round uses, in the order of partition ids.

    Args:
        replies: the replies.
        weighted_by: the source of the weights (``Phase.weights``).

    Attributes:
        weights: a weight >= 0 for each reply; the normalised weights are p_i. If the
            weights are losses that are all zero, they are replaced by equal weights.
    """

    weights: list[float]

    def __new__(
        cls, replies: Iterable[Reply] = (), weighted_by: str = "examples"
    ) -> Replies:
        """Return the replies with their weights."""
        self = super().__new__(cls, replies)
        if weighted_by == "examples":
            weights = [reply.num_examples for reply in self]
        elif weighted_by == "equal":
            weights = [1.0] * len(self)
        else:
            weights = [reply.metrics[weighted_by] for reply in self]
            # Weights that are all zero, such as losses, cannot be normalised.
            if not any(weights):
                weights = [1.0] * len(self)
        self.weights = weights
        return self

    def average_of(self, key: str, weights: Sequence[float]) -> dict[str, Any]:
        """Return the average of a record, each entry over the replies that have it."""
        records = [reply.extras.get(key, {}) for reply in self]
        names = dict.fromkeys(name for record in records for name in record)
        averaged = {}
        for name in names:
            arrays, own_weights = [], []
            # A client may lack an entry: for example, a frozen layer has no momentum.
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


class Ask(NamedTuple):
    """A client hook of a round.

    Attributes:
        hook: its name in ``client_hooks``.
        config: the config entries that its clients receive.
        sends: the records that the server sends in addition to the model, by key;
            ``phases`` declares each.
        unnamed: whether the reply may omit the hook from its list of applied hooks,
            because the rest of the reply shows the hook's effect, or because a client
            may skip the hook.
        tunes: whether the hook also acts in the training before a test (``fine_tune``).
            Such a hook belongs to the client's own steps, and needs no record from the
            server.
    """

    hook: str
    config: Mapping[Any, Any] = {}
    sends: Mapping[Any, State] = {}
    unnamed: bool = False
    tunes: bool = False


ROLES = ("local-part", "client-hooks", "server-step")
"""The things that a method may add to another method; each is a config key."""
Role = Literal["", "local-part", "client-hooks", "server-step", "option"]
P = TypeVar("P", bound=Params, default=Params)
S = TypeVar("S", default=None)


class Method(Generic[P, S]):
    """A method, by default FedAvg. A subclass overrides the parts its paper changes.

    Attributes:
        name: the name in configs and messages.
        summary_line: the description in the tables.
        source: the paper.
        role: the part that the method adds to another method, and its config key;
            empty if the method is not combined with others.
        alone: the reason why the method is not combined with others. Such a method has
            no role, whatever the role of its base is.
        instead: the alternative if the method does not fit.
        Params: the class of the settings; its fields are constructor arguments of the
            strategy.
        State: the class of the state, which is an attribute of the strategy, even
            before a run. It is None without a state, or if the state is not a
            dataclass.
        client_hooks: factories of the client hooks, by name.
        checks: the possible problems, at the end of the method's file.
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
    checks: ClassVar[Sequence[Problem]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Remove an inherited role if the method is not combined with others."""
        super().__init_subclass__(**kwargs)
        if cls.alone:
            cls.role = ""

    def __init__(self, params: P) -> None:
        self.params = params

    @property
    def title(self) -> str:
        """The method's name in messages."""
        return self.name if self.role == "option" else f"strategy {self.name!r}"

    def phases(self) -> tuple[Phase, ...]:
        """Return the phases, each with its sent, local and frozen entries."""
        return (Phase(),)

    @cached_property
    def declared(self) -> tuple[Phase, ...]:
        """The phases, with all entries that the method reads in single replies.

        If a class overrides ``aggregate`` below the class that declares ``phases``, it
        may read everything in the replies. The same is true if it overrides ``far``.
        """
        phases = self.phases()
        if reads_undeclared(type(self)) or type(self).far is not Method.far:
            return tuple(replace(one, each=ALL) for one in phases)
        return phases

    @cached_property
    def all_phases(self) -> Phase:
        """All phases, merged into one."""
        return together(self.declared)

    def begin(self, facts: Facts) -> S:
        """Return the state before round 1, a ``State`` with the defaults of its fields.

        Raises:
            ConfigError: a setting does not fit the run.
        """
        return self.State() if self.State else None  # type: ignore[return-value]

    def phase_name(self, state: S, number: int) -> str:
        """Return the name of the round's phase, one of ``phases``."""
        return self.declared[0].name

    def on_clients(self, state: S, facts: Facts) -> list[Ask]:
        """Return the client hooks of the round, in order."""
        return []

    def far(self, state: S, facts: Facts, replies: Sequence[Reply]) -> dict[Node, str]:
        """Return the nodes whose replies no honest client sends, with the reasons.

        The round refuses them. ``replies`` are whole: with this function, a method is
        assumed to read all parts of single replies.
        """
        return {}

    def aggregate(
        self, state: S, facts: Facts, replies: Replies, model: dict[str, Any]
    ) -> tuple[dict[str, Any], S]:
        """Return the new global state, and the method's state after the round.

        Args:
            state: the state after the last round.
            facts: the round.
            replies: the usable replies, in the order of partition ids, and their
                weights; their arrays are read-only.
            model: a new dict with the average of the replies, with the weights p_i, and
                exactly the frozen entries that were sent.
        """
        return model, state

    def outcome(self, state: S, num_rounds: int) -> dict[str, Any]:
        """Return the method's entries of the summary after ``num_rounds``, by key."""
        return {}


def far_from_others(
    what: str, values: Mapping[Node, float], most: float, least: float = 0.0
) -> dict[Node, str]:
    """Return the nodes with a value far from the median of the positive values.

    Args:
        what: a text that names the value, for the reasons.
        values: a value >= 0 of each node.
        most: the largest ratio of a value and the median.
        least: the smallest ratio.
    """
    usual = statistics.median_low([v for v in values.values() if v > 0] or [0.0])
    return {
        node: f"{what} is {value:.3g}, but the nodes' median is {usual:.3g}"
        for node, value in values.items()
        if not least * usual <= value <= most * usual
    }


def reads_undeclared(kind: type[Method[Any, Any]]) -> bool:
    """Return whether ``aggregate`` may read more than ``phases`` declares."""
    # Of the base classes, the one nearest to ``kind`` decides. A class with both
    # functions declares all entries that it reads.
    for base in kind.__mro__:
        if "phases" in vars(base):
            return False
        if "aggregate" in vars(base):
            return True
    return False
