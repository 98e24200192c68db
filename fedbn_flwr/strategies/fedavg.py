"""FedAvg, safe for BatchNorm: the base of every strategy of this package.

McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data", Algorithm 1.

=========  =========================================================================================
sent down  the whole state (a method with local parts: the shared entries; all of them the first time)
sent up    the shared entries after local training
kept       nothing (a method with local parts: those, in each client's ``Context.state``)
cost       F floats down (one broadcast), F up per client; F = 271,098 for ResNet-20
=========  =========================================================================================

p_i = ``num_examples`` of client i over the sum of the round's clients. Floating entries: sum p_i x_i in float64, in
the order of partition ids. Differs from the paper: BN's int64 counters take the maximum, and ``variance="pooled"``
may add the spread of the client means to the running variances. Law: the result does not depend on the order in which
replies arrive, and with one client it is that client's state.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from logging import INFO, WARNING
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common import log
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

from fedbn_flwr.averaging import State, Variance, average, check_finite, check_state
from fedbn_flwr.errors import ClientPartError, ConfigError, NormLayerError, ReplyError, unknown_name
from fedbn_flwr.exchange import prompt
from fedbn_flwr.records import from_record, num_bytes, to_record
from fedbn_flwr.state import Part, Parts, split_state
from fedbn_flwr.state_folder import Continuity
from fedbn_flwr.strategies.metrics import average_metrics
from fedbn_flwr.strategies.momentum import MOMENTUM, MomentumScope, average_buffers, make_momentum
from fedbn_flwr.strategies.recalibration import QUERY, from_entries, pooled
from fedbn_flwr.strategies.report import RoundReport, Traffic
from fedbn_flwr.strategies.roster import PROPERTIES, Node, Roster
from fedbn_flwr.strategies.rounds import run_rounds
from fedbn_flwr.strategies.shared_bn import SHARED_BN, LatestBN, make_share_bn
from fedbn_flwr.training import Rule

__all__ = ["FedAvg", "FedAvgParams", "Reply", "acknowledged", "joined"]


@dataclass(frozen=True, kw_only=True)
class FedAvgParams:
    """What every strategy of this package can be told beside Flower's own arguments.

    Attributes:
        variance: how running variances are averaged, "mean" or "pooled".
        min_replies: usable replies below which a round keeps the previous global model.
        eval_every: client evaluation every so many rounds, and in the last one.
        momentum_scope: what becomes of SGD's momentum between rounds; see ``strategies.momentum``.
        recalibrate: every test and the final model take statistics gathered from the clients; training does not see
            them. See ``strategies.recalibration``.
        eval_on: comma list of tests; "recalibrated" and "averaged-bn" in it are what ``completion`` shall offer.
        seed: of the sampling of nodes.
    """

    variance: Variance = "mean"
    min_replies: int = 1
    eval_every: int = 1
    momentum_scope: MomentumScope = "none"
    recalibrate: bool = False
    eval_on: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values."""
        if self.variance not in ("mean", "pooled"):
            raise unknown_name("variance", self.variance, ["mean", "pooled"])
        if self.momentum_scope not in ("none", "local", "global"):
            raise unknown_name("momentum_scope", self.momentum_scope, ["none", "local", "global"])
        for key in ("min_replies", "eval_every"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key}={getattr(self, key)} must be at least 1")


@dataclass(frozen=True)
class Reply:
    """A usable reply: who sent it, the weight's count |D_i|, the shared entries, the metrics, and further records."""

    node: Node
    num_examples: float
    state: State
    metrics: Mapping[str, float]
    extras: Mapping[str, State] = field(default_factory=dict)


class FedAvg(FlowerFedAvg):
    """Federated averaging. Takes Flower's own constructor arguments, and the fields of ``Params`` by name.

    ``state_dict()`` is what outlives a round beside the global model; after ``load_state_dict`` the next ``start`` goes
    on from there. A subclass names in ``lasting`` the attributes it adds.

    Args:
        *args: positional arguments of ``flwr.serverapp.strategy.FedAvg`` (``fraction_train``, ...).
        parts: the split of the model's state (``split_state(model)``); made from the names of the initial arrays
            where it is not given.
        **kwargs: Flower's arguments and the fields of ``Params``.

    Raises:
        ConfigError: an argument nobody knows, or a value out of range.
    """

    name: ClassVar[str] = "fedavg"
    summary_line: ClassVar[str] = "weighted average of everything, BN counters kept exact"
    source: ClassVar[str] = "McMahan 2017"
    local: ClassVar[frozenset[Part]] = frozenset()
    # Client rules whose word is not needed: what they do shows in the reply, or a client may leave it.
    proved: ClassVar[frozenset[str]] = frozenset({"share-bn"})
    needs_batchnorm: ClassVar[bool] = False
    gathers: ClassVar[bool] = False  # whether the method itself tests with gathered statistics
    Params: ClassVar[type[FedAvgParams]] = FedAvgParams
    rules: ClassVar[Mapping[str, Callable[[Mapping[str, Any]], Rule]]] = {
        "momentum": make_momentum,
        "share-bn": make_share_bn,
    }
    lasting: ClassVar[tuple[str, ...]] = ("momentum", "local_hashes", "volatile", "started", "gathered", "shared_bn")

    def __init__(self, *args: Any, parts: Parts | None = None, **kwargs: Any) -> None:
        fields = {field.name for field in dataclasses.fields(self.Params)}
        settings = {key: kwargs.pop(key) for key in fields & kwargs.keys()}
        try:
            super().__init__(*args, **kwargs)
        except TypeError as error:
            allowed = ", ".join(sorted(fields))
            message = f"{type(self).__name__}: {error}. Beside Flower's own arguments it takes: {allowed}, parts."
            raise ConfigError(message) from error
        if self.train_metrics_aggr_fn is aggregate_metricrecords:
            self.train_metrics_aggr_fn = average_metrics
        if self.evaluate_metrics_aggr_fn is aggregate_metricrecords:
            self.evaluate_metrics_aggr_fn = average_metrics
        self.params: Any = self.Params(**settings)
        self._tests = [name.strip() for name in self.params.eval_on.split(",")]
        self.check_tests(self._tests, self.params.recalibrate)
        self.parts = parts
        self.num_rounds: int | None = None
        self.reports: list[RoundReport] = []
        self.local_hashes: dict[str, str] = {}
        self.volatile: list[str] = []  # clients that keep something in memory alone
        self.continuity: Continuity | None = None  # what clients are told of the run, for their state folders
        self._saved: tuple[int, Mapping[str, Any]] | None = None
        self._owed: Mapping[str, str] | None = None
        self._met: set[str] = set()
        self._timeout = 3600.0
        self._asked: list[Node] = []
        self._rules_told: frozenset[str] = frozenset()
        self._begun = False
        self.momentum: dict[str, Any] = {}
        self.num_able = 0  # nodes with training data, N of the papers
        self.gathered: dict[str, Any] = {}  # running statistics for the model after this round
        self.latest_bn = LatestBN()
        self.arrays = ArrayRecord()  # the global model, as training goes on with it; tests may complete it
        self._roster = Roster(self.params.seed, self._timeout)

    # --- what a method overrides -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Check the method's settings against the run (``num_rounds``, ``parts``) and forget an earlier run."""
        self.momentum, self.gathered, self.latest_bn = {}, {}, LatestBN()
        asked = self.params.recalibrate or "recalibrated" in self._tests
        if asked and not list(self._known_parts.moments()):
            raise NormLayerError(
                "recalibration gathers BatchNorm's running statistics, and the model has none. Use recalibrate=false "
                "and no eval-on=recalibrated, or a model with BatchNorm."
            )

    @classmethod
    def check_tests(cls, tests: Sequence[str], recalibrate: bool = False) -> None:
        """Refuse what this method has no model for.

        Raises:
            ConfigError: gathered statistics where weights stay with the clients; averaged BN parts where none do.
        """
        bn_parts, weights = cls.local - {Part.REST}, cls.local & {Part.AFFINE, Part.REST}
        if (recalibrate or "recalibrated" in tests) and weights:
            raise ConfigError(
                f"strategy {cls.name!r} keeps {' and '.join(sorted(weights))} with its clients: there are no global "
                "weights under which statistics could be gathered (recalibrate, eval-on=recalibrated)."
            )
        if SHARED_BN in tests and (not bn_parts or Part.REST in weights):
            raise ConfigError(
                f"eval-on={SHARED_BN} completes a global model with the average of BN parts that stay with the "
                f"clients; strategy {cls.name!r} has no such model. It is for fedbn, silobn and mtfl."
            )

    @classmethod
    def exchange_cost(cls, exchanges: str) -> tuple[int, int]:
        """Return what a synchronised BN layer costs beside the model: exchanges, and rows of its channels each way."""
        return 0, 0

    @classmethod
    def extra_copies(cls, momentum_scope: str) -> tuple[int, int]:
        """Return how often the trainable floats travel beside the model: of shared entries, and of all."""
        return int(momentum_scope == "global"), 0

    def phase(self, server_round: int) -> str:
        """Return the name of the method's phase in this round."""
        return "train"

    def client_config(self, server_round: int) -> dict[str, Any]:
        """Return what the method tells its clients in this round; ``rules`` names the client rules to apply."""
        scope = self.params.momentum_scope
        told = {} if scope == "none" else {"rules": "momentum", "momentum-scope": scope}
        return joined(told, {"rules": "share-bn"}) if SHARED_BN in self._tests else told

    def extras(self, server_round: int) -> Mapping[str, State]:
        """Return what goes to the clients beside the model, by record; a client may answer in these records alone."""
        sent: dict[str, State] = {MOMENTUM: self.momentum} if self.params.momentum_scope == "global" else {}
        return {**sent, SHARED_BN: {}} if SHARED_BN in self._tests else sent

    def weights(self, replies: Sequence[Reply]) -> list[float]:
        """Return the weights of the replies, in their order; they are normalised later."""
        return [reply.num_examples for reply in replies]

    def check(self, server_round: int, reply: Reply, before: State) -> None:
        """Refuse a reply that breaks the method's own law, with a ReplyError."""
        if shared := reply.extras.get(SHARED_BN):
            local = self._known_parts.select(self.local)
            check_state(shared, {name: before[name] for name in local}, self._known_parts)

    def combine(self, server_round: int, replies: Sequence[Reply], before: State) -> dict[str, Any]:
        """Return the new global state from the round's replies (in order of partition id) and the state before."""
        if self.params.momentum_scope == "global":
            sent = [reply.extras.get(MOMENTUM, {}) for reply in replies]
            self.momentum = average_buffers(sent, self.weights(replies))
        return average(
            [reply.state for reply in replies], self.weights(replies), self._known_parts, self.params.variance
        )

    # --- Flower's calls ----------------------------------------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the rounds as Flower's own loop does, with a prompt grid. ``timeout`` also bounds the wait for nodes.

        After ``load_state_dict`` the rounds go on where it says, and ``initial_arrays`` are the global model of then.

        Raises:
            EngineError: not enough nodes within the timeout.
            ConfigError: settings that do not fit this run.
        """
        after = self.prepare(initial_arrays, num_rounds, timeout)

        def tested(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            self.arrays = arrays
            return evaluate_fn(server_round, self._tested(arrays)) if evaluate_fn else None

        result = run_rounds(
            self,
            prompt(grid),
            initial_arrays,
            after,
            num_rounds,
            timeout,
            train_config,
            evaluate_config,
            tested,
        )
        if not result.arrays:  # no round had enough usable replies: the previous global model is the initial one
            result.arrays = initial_arrays
        result.arrays = self._tested(_over(result.arrays, self.completion(SHARED_BN)))
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return what outlives a round of a begun run beside the model: JSON values and arrays by attribute."""
        return {name: getattr(self, name) for name in self._lasting()}

    def load_state_dict(self, state: Mapping[str, Any], server_round: int) -> None:
        """Let the next ``start`` go on after ``server_round`` with what ``state_dict`` returned then.

        Raises:
            ConfigError: it is the state of another method.
        """
        if set(state) != set(self._lasting()):
            found, wanted = ", ".join(sorted(state)), ", ".join(sorted(self._lasting()))
            raise ConfigError(f"the state of a strategy {self.name!r} holds {wanted}; this one holds {found}")
        self._saved = server_round, dict(state)

    @property
    def started(self) -> list[str]:
        """The clients that have had the common start, by label."""
        return self._roster.started_labels

    @started.setter
    def started(self, labels: Sequence[str]) -> None:
        self._roster.expect_started(labels)

    @property
    def shared_bn(self) -> list[Any]:
        """What clients shared of their BN for tests, as a tree."""
        return self.latest_bn.tree

    @shared_bn.setter
    def shared_bn(self, tree: Sequence[Any]) -> None:
        self.latest_bn = LatestBN(tree)

    def prepare(self, initial_arrays: ArrayRecord, num_rounds: int | None, timeout: float) -> int:
        """Forget an earlier run and get ready for this one; ``start`` does this first.

        Args:
            initial_arrays: the common start.
            num_rounds: rounds of the run; None where a loop of Flower's keeps it to itself.
            timeout: seconds to wait for nodes and for replies.

        Returns:
            The round to go on after: 0, or the one given to ``load_state_dict``.

        Raises:
            ConfigError: settings that do not fit this run.
        """
        self.num_rounds, self._timeout, self.reports = num_rounds, timeout, []
        self.local_hashes, self.volatile = {}, []
        self._roster = Roster(self.params.seed, timeout)
        self._know(initial_arrays)
        self._begin()
        return self._restore()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample nodes with data and address a message to each; see ``flwr.serverapp.strategy.Strategy``."""
        self._know(arrays)
        if not self._begun:  # a start() of the user's own, which calls this method
            self._begin()
        self._before, self.gathered = from_record(arrays), {}
        self.reports.append(RoundReport(server_round, self.phase(server_round)))
        if self.fraction_train == 0.0:
            return []
        present = self._roster.present(grid, max(self.min_available_nodes, self.min_train_nodes))
        for node in present:
            if node.unusable:
                self.reports[-1].reject(node.node_id, f"{node}: {node.unusable}")
        able = [node for node in present if node.num_examples != 0]
        self.num_able = len(able)
        count = max(_share(self.fraction_train, len(able)), self.min_train_nodes)
        nodes = self._roster.sample(able, count, "train", server_round)
        log(INFO, "configure_train: Sampled %s nodes (out of %s)", len(nodes), len(able))
        method = self.client_config(server_round)
        self._rules_told = _names(method.get("rules"))
        told = ConfigRecord({**config, "server-round": server_round, **self._common(), **method})
        extras = {key: to_record(state) for key, state in self.extras(server_round).items()}
        return self._address(nodes, MessageType.TRAIN, arrays, told, self.reports[-1].train, extras)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Refuse bad replies by name, average the rest; below ``min_replies`` keep the previous model."""
        report = self.reports[-1]
        usable: list[Reply] = []
        lacking: list[ClientPartError] = []
        contents: list[RecordDict] = []
        for node, message in self._in_order(replies, report):
            self._note_kept(node, message)
            try:
                reply, sizes = self._read(server_round, node, message)
            except ReplyError as error:
                report.reject(node.node_id, f"{node}: {error}")
                self._roster.started.discard(node.node_id)
                log(WARNING, "round %d: reply of %s refused: %s", server_round, node, error)
                lacking += [error] if isinstance(error, ClientPartError) else []
                continue
            usable.append(reply)
            contents.append(message.content)
            self.latest_bn.take(node.order, reply.extras.get(SHARED_BN, {}), reply.num_examples)
            self._roster.started.add(node.node_id)
            for size in sizes:
                report.train.count_up(size)
        report.participants = [reply.node.partition_id for reply in usable]
        report.clients = {reply.node.label: dict(reply.metrics) for reply in usable}
        if lacking and not usable:  # every further round would end like this one
            raise lacking[0]
        if len(usable) < self.params.min_replies:
            report.kept_previous = True
            log(
                WARNING,
                "round %d: %d usable replies, %d needed (min_replies): the previous global model is kept.",
                server_round,
                len(usable),
                self.params.min_replies,
            )
            return None, None
        state = {**self._before, **self.combine(server_round, usable, self._before)}
        metrics = self.train_metrics_aggr_fn(contents, self.weighted_by_key)
        report.metrics = {key: value for key, value in metrics.items() if isinstance(value, (int, float))}
        return to_record(state), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Every ``eval_every`` rounds and in the last: gather statistics where asked, and ask nodes to evaluate."""
        if server_round % self.params.eval_every and server_round != self.num_rounds:
            return []
        if self._is_gathering:
            self._gather(server_round, arrays, grid)
        if self.fraction_evaluate == 0.0:
            return []
        present = self._roster.present(grid, max(self.min_available_nodes, self.min_evaluate_nodes))
        present = [node for node in present if not node.unusable]
        count = max(_share(self.fraction_evaluate, len(present)), self.min_evaluate_nodes)
        nodes = self._roster.sample(present, count, "evaluate", server_round)
        told = ConfigRecord({**config, "server-round": server_round, **self._common()})
        # A client without BN parts of its own takes the average, where there is one, in place of the initial ones.
        arrays = self._tested(_over(arrays, self.completion(SHARED_BN)))
        return self._address(nodes, MessageType.EVALUATE, arrays, told, self.reports[-1].evaluate, {})

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the clients' metrics; keep each client's own in the report."""
        contents = []
        report = self.reports[-1]
        for node, message in self._in_order(replies, report):
            if message.has_content() and self._tested_nothing(message):
                continue
            try:
                numbers = self._metrics(message)
            except ReplyError as error:
                report.reject(node.node_id, f"{node}: evaluation: {error}")
                if message.has_error():  # a client that lost its own part needs the start again
                    self._roster.started.discard(node.node_id)
                log(WARNING, "round %d: evaluation of %s refused: %s", server_round, node, error)
                continue
            contents.append(message.content)
            report.evaluations[node.label] = numbers
        return self.evaluate_metrics_aggr_fn(contents, self.weighted_by_key) if contents else None

    # --- models for tests --------------------------------------------------------------------------------------------

    @property
    def recalibrates(self) -> bool:
        """Whether every test and the final model take gathered statistics."""
        return self.gathers or self.params.recalibrate

    @property
    def _is_gathering(self) -> bool:
        asked = self.recalibrates or "recalibrated" in self._tests
        return asked and any(self._known_parts.moments())

    def completion(self, test: str) -> State:
        """Return the entries to put over the global state for "recalibrated" or "averaged-bn"; empty where not asked.

        "recalibrated" is there in rounds with a test, from ``configure_evaluate`` on.
        """
        if test == SHARED_BN and SHARED_BN in self._tests:
            return self.latest_bn.average(self._known_parts, self.params.variance)
        return self.gathered if test == "recalibrated" else {}

    def _tested(self, arrays: ArrayRecord) -> ArrayRecord:
        return _over(arrays, self.gathered) if self.recalibrates else arrays

    def _gather(self, server_round: int, arrays: ArrayRecord, grid: Grid) -> None:
        """Gather the statistics of all clients with data under ``arrays``; without usable replies there are none."""
        report, like = self.reports[-1], from_record(arrays)
        # What the method needs is a cost of its training; what only a further test needs is one of testing.
        traffic = report.train if self.recalibrates else report.evaluate
        present = self._roster.present(grid, max(self.min_available_nodes, 1))
        nodes = [node for node in present if node.num_examples != 0]
        told = ConfigRecord({"server-round": server_round, **self._common()})
        messages = self._address(nodes, QUERY, arrays, told, traffic, {})
        found = []
        for node, message in self._in_order(grid.send_and_receive(messages, timeout=self._timeout), report):
            try:
                self._metrics(message)
                state, _, sizes = self._unpack(message)
                found.append(from_entries(state, like, self._known_parts))
                for size in sizes:
                    traffic.count_up(size)
            except ReplyError as error:
                report.reject(node.node_id, f"{node}: statistics: {error}")
                log(WARNING, "round %d: statistics of %s refused: %s", server_round, node, error)
        self.gathered = pooled(found, like, self._known_parts) if len(found) >= self.params.min_replies else {}
        if not self.gathered:
            log(WARNING, "round %d: no statistics gathered from %d usable replies", server_round, len(found))

    # --- the mechanism -----------------------------------------------------------------------------------------------

    @property
    def total_rounds(self) -> int:
        """The number of rounds of the run; ConfigError where the loop that runs them keeps it to itself."""
        if self.num_rounds is None:
            raise ConfigError(
                f"strategy {self.name!r} needs the number of rounds, which is not known where its own start() is not "
                "called: give it rounds (int), not fractions; in Flower's legacy loop pass num_rounds= to to_legacy."
            )
        return self.num_rounds

    @property
    def _known_parts(self) -> Parts:
        if self.parts is None:
            raise ConfigError(
                "the split of the state is not known before the first arrays; pass parts=split_state(model)"
            )
        return self.parts

    def _lasting(self) -> list[str]:
        return [name for kind in reversed(type(self).__mro__) for name in vars(kind).get("lasting", ())]

    def _restore(self) -> int:
        """Take over what ``load_state_dict`` was given; return the round to go on after."""
        (after, state), self._saved = self._saved or (0, {}), None
        for name, value in state.items():
            setattr(self, name, value)
        self._owed, self._met = (dict(self.local_hashes) if state else None), set()
        return after

    def _note_kept(self, node: Node, message: Message) -> None:
        """Note the hash of what the client keeps now, whether its reply is used or not, and whether it is durable."""
        properties = message.content.config_records.get(PROPERTIES) if message.has_content() else None
        if properties and "local-sha256" in properties:
            self.local_hashes[node.label] = str(properties["local-sha256"])
            if (properties.get("local-home") != "folder") != (node.label in self.volatile):
                self.volatile = sorted({*self.volatile} ^ {node.label})

    def _know(self, arrays: ArrayRecord) -> None:
        if self.parts is None:
            self.parts = split_state(arrays)
        if unknown := [name for name in arrays if name not in self.parts.part_of]:
            raise ConfigError(
                f"parts= does not know {len(unknown)} of the arrays ({unknown[0]}, ...): it was made from another model"
            )

    def _begin(self) -> None:
        self._begun = True
        self.begin()

    def _common(self) -> dict[str, Any]:
        local = {"local-parts": ",".join(sorted(self.local))} if self.local else {}
        return {**(self.continuity.told() if self.continuity else {}), **local}

    def _told(self, node: Node, config: ConfigRecord) -> ConfigRecord:
        """Return the config with the hash a client shall go on from, until it has answered once after a resume."""
        if self._owed is None or node.label in self._met:
            return config
        return ConfigRecord({**config, "local-sha256": self._owed.get(node.label, "")})

    def _shared(self, arrays: ArrayRecord) -> ArrayRecord:
        part_of = self._known_parts.part_of
        return ArrayRecord({name: array for name, array in arrays.items() if part_of[name] not in self.local})

    def _address(
        self,
        nodes: Sequence[Node],
        message_type: str,
        arrays: ArrayRecord,
        config: ConfigRecord,
        traffic: Traffic,
        extras: Mapping[str, ArrayRecord],
    ) -> list[Message]:
        shared = self._shared(arrays) if self.local else arrays
        self._asked = list(nodes)
        traffic.exchanges += bool(nodes)
        started = {node.node_id: node.node_id in self._roster.started for node in nodes}
        for had_start in set(started.values()):  # the same arrays to several nodes are one broadcast
            traffic.count_down(num_bytes(shared if had_start else arrays))
        for extra in extras.values():
            traffic.count_down(num_bytes(extra))
        # By name, and with the start alone: a client that sees arrays and no model cannot tell the parts apart.
        local = self._known_parts.select(self.local)
        first = ConfigRecord({**config, "local-entries": json.dumps(local)}) if local else config
        messages = []
        for node in nodes:
            model, told = (shared, config) if started[node.node_id] else (arrays, first)
            content = RecordDict({self.arrayrecord_key: model, **extras})
            content[self.configrecord_key] = self._told(node, told)
            messages.append(Message(content, node.node_id, message_type))
        return messages

    def _tested_nothing(self, message: Message) -> bool:
        """Tell whether a client without test data answered an evaluation: nothing to average, nothing wrong."""
        return [m.get(self.weighted_by_key) for m in message.content.metric_records.values()] == [0]

    def _metrics(self, message: Message) -> dict[str, float]:
        if message.has_error():
            reason = str(message.error.reason)
            raise ReplyError(f"error {message.error.code}: {reason}{_advice(reason)}")
        if len(message.content.metric_records) != 1:
            raise ReplyError(f"{len(message.content.metric_records)} MetricRecords, expected 1")
        (metrics,) = message.content.metric_records.values()
        count = metrics.get(self.weighted_by_key)
        if not isinstance(count, (int, float)) or not math.isfinite(count) or count <= 0:
            raise ReplyError(f"'{self.weighted_by_key}' is {count}, which must be a finite number above 0")
        return {key: value for key, value in metrics.items() if isinstance(value, (int, float))}

    def _unpack(self, message: Message) -> tuple[State, dict[str, State], list[tuple[int, int]]]:
        """Return the entries, those of further records, and the bytes of all records."""
        try:
            states: dict[str, State] = {key: from_record(r) for key, r in message.content.array_records.items()}
            state = states.pop(self.arrayrecord_key)
            return state, states, [num_bytes(record) for record in message.content.array_records.values()]
        except KeyError as error:
            raise ReplyError(f"no ArrayRecord '{self.arrayrecord_key}'") from error
        except Exception as error:  # bytes from outside: NumPy's parser may raise anything
            raise ReplyError(f"arrays that cannot be read: {type(error).__name__}: {error}") from error

    def _read(self, server_round: int, node: Node, message: Message) -> tuple[Reply, list[tuple[int, int]]]:
        metrics = self._metrics(message)
        state, states, sizes = self._unpack(message)
        self._refuse_missing_part(state, message)
        expected = {n: a for n, a in self._before.items() if self._known_parts.part_of[n] not in self.local}
        check_state(state, expected, self._known_parts)
        for key, extra in states.items():
            check_finite(extra, f"record '{key}': ")
        count = metrics[self.weighted_by_key]
        if self.weighted_by_key == "num-examples" and node.num_examples is not None:
            count = node.num_examples
        reply = Reply(node, count, state, metrics, states)
        self.check(server_round, reply, self._before)
        return reply, sizes

    def _refuse_missing_part(self, state: State, message: Message) -> None:
        """Refuse a reply from an app that lacks what the method needs at the client, by what is missing."""
        part_of = self._known_parts.part_of
        if kept := [name for name in state if part_of.get(name) in self.local]:
            raise ClientPartError(
                f"the reply holds {len(kept)} entries that stay with the client under strategy '{self.name}' "
                f"('{kept[0]}', ...). Make the app `ClientApp(mods=[local_bn])`, from fedbn_flwr.mods."
            )
        if missing := sorted(self._rules_told - acknowledged(message) - self.proved):
            raise ClientPartError(
                f"the client did not apply the rule '{missing[0]}' of strategy '{self.name}'. Its training must run "
                "inside `with bn_rules(model, msg, context) as rules:` (what to call there: docs/flower-projects.md), "
                "and its app be `ClientApp(mods=[local_bn])`, both from fedbn_flwr.mods."
            )

    def _in_order(self, replies: Iterable[Message], report: RoundReport) -> list[tuple[Node, Message]]:
        """Return the replies by partition id; note the nodes that were asked and did not answer."""
        pairs = [(self._roster.met(message), message) for message in replies]
        answered = {node.node_id for node, _ in pairs}
        self._met |= {node.label for node, message in pairs if message.has_content() or _reached_client(message)}
        for node in self._asked:
            if node.node_id not in answered and node.node_id not in report.rejected:
                report.reject(node.node_id, f"{node}: no reply within {self._timeout:g} s")
                log(WARNING, "round %d: no reply from %s within %g s", report.server_round, node, self._timeout)
        self._asked = []
        return sorted(pairs, key=lambda pair: pair[0].order)


def acknowledged(message: Message) -> frozenset[str]:
    """Return the rules that the client says it applied."""
    properties: Mapping[str, Any] = message.content.config_records.get(PROPERTIES, {})
    return _names(properties.get("rules-applied"))


def joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return both messages to the clients as one, the lists of rules joined."""
    rules = ",".join(filter(None, (str(config.get("rules", "")) for config in (first, second))))
    return {**first, **second, "rules": rules}


def _over(arrays: ArrayRecord, entries: State) -> ArrayRecord:
    """Return the record with some entries replaced; itself where there are none to replace."""
    return ArrayRecord({**arrays, **to_record(entries)}) if entries else arrays


def _reached_client(error_reply: Message) -> bool:
    return error_reply.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION


def _names(listed: object) -> frozenset[str]:
    return frozenset(filter(None, str(listed or "").split(",")))


def _share(fraction: float, count: int) -> int:
    """Return floor(fraction * count), the fraction taken as the decimal it is written as: 0.29 of 100 is 29."""
    return math.floor(Fraction(str(fraction)) * count)


def _advice(reason: str) -> str:
    if "fitins.parameters" in reason:
        return ". This ClientApp is built from a NumPyClient: make it with fedbn_flwr.client_app(client_fn)"
    return ""
