"""The strategies in Flower's legacy loop, as a ``flwr.server.strategy.Strategy``.

This module is for projects with ``flwr.server.ServerApp`` and ``ServerAppComponents``,
with ``start_server``, or with ``DefaultWorkflow`` and ``SecAggPlusWorkflow``. The
legacy loop sends a list of arrays and a config of scalars in each direction, with one
``fit`` and one ``evaluate`` per round. The config has the names of the arrays, as for
``client_app`` (``messages.numpy_client``). Methods that need exchanges inside a round
are refused.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

import torch
from flwr.app import Array as FlowerArray
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    MessageType,
)
from flwr.common import (
    Code,
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    GetPropertiesIns,
    NDArrays,
    Parameters,
    Scalar,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import Strategy as FlowerLegacyStrategy
from flwr.serverapp import Grid

from fedbn_flwr.compat.flower import (
    SECURE_WORKFLOWS,
    app_error,
    calling_object,
    identify_process,
    proxy_error,
    refuse_legacy_names,
)
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.legacy.secure_aggregation import (
    refuse_under_secure_aggregation,
    restored,
)
from fedbn_flwr.messages.numpy_client import (
    describe,
    open_message,
    reply_to_evaluate,
    reply_to_fit,
)
from fedbn_flwr.messages.protocol import (
    CLIENT_KEYS,
    LOSS,
    SERVER_ROUND,
    merged_config,
)
from fedbn_flwr.messages.records import from_record, to_record
from fedbn_flwr.problems import Known, Problem, found_problems, raise_or_warn
from fedbn_flwr.server.methods.params import RECALIBRATED
from fedbn_flwr.server.runs.failures import losses_not_finite, note_losses
from fedbn_flwr.server.runs.protection import Protection
from fedbn_flwr.server.strategy import Strategy
from fedbn_flwr.transport.polling_grid import ImmediateGrid

ConfigFn = Callable[[int], dict[str, Scalar]]
MetricsFn = Callable[[list[tuple[int, dict[str, Scalar]]]], dict[str, Scalar]]
EvaluateFn = Callable[
    [int, NDArrays, dict[str, Scalar]], tuple[float, dict[str, Scalar]] | None
]
Failures = list[tuple[ClientProxy, Any] | BaseException]
Ins = TypeVar("Ins", FitIns, EvaluateIns)


class LegacyStrategy(FlowerLegacyStrategy):
    """A strategy for Flower's legacy loop, also named ``to_legacy``.

    Pass it as ``ServerAppComponents(strategy=to_legacy(...), config=...)`` or, for
    ``DefaultWorkflow``, as
    ``LegacyContext(context, config=..., strategy=to_legacy(...))``. The latter also
    works with ``SecAggPlusWorkflow`` for fit. If a project's own strategy overrides
    methods of Flower's FedAvg, derive it from this class instead.

    Clients are NumPyClients. FedAvg and the server optimizers need nothing more. The
    other methods need the mod ``bn_mod`` (and ``bn_rules`` in ``fit``), or a
    ``TorchClient`` in Flower's own ``ClientApp(client_fn=...)``. ``start_client`` takes
    an app with the mod as ``to_client_fn(app, node_config)``. Runs repeat bit for bit
    only with the mod, or with a ``get_properties`` that returns the ``partition-id``.
    Otherwise the order of sums depends on node ids.

    A diverged run ends with a DivergedError, as with ``start``. If no round had enough
    usable replies, the run ends with a NothingTrainedError: in its last round if
    ``num_rounds`` is given, otherwise in the second round.

    Example, with ``build_model`` and ``arrays`` as in the example of
    ``InProcessGrid``::

        >>> from flwr.server import ServerAppComponents, ServerConfig
        >>> from fedbn_flwr import to_legacy
        >>> strategy = to_legacy(FedBN(), arrays, num_rounds=2)
        >>> config = ServerConfig(num_rounds=2)
        >>> components = ServerAppComponents(strategy=strategy, config=config)
        >>> len(strategy.initialize_parameters(None).tensors)  # the model's entries
        9

    Args:
        strategy: a strategy of this package, with Flower's Message-API arguments
            (``fraction_train``, ...).
        initial_arrays: the common start, ``ArrayRecord(model.state_dict())``, which
            determines names and parts.
        num_rounds: number of rounds, because the legacy loop does not pass it. It is
            necessary if a setting is a share of the rounds.
        evaluate_fn: as in Flower's legacy FedAvg,
            ``(round, arrays, config) -> (loss, metrics)``.
        on_fit_config_fn: as in FedAvg, adds config for training.
        on_evaluate_config_fn: as in FedAvg, adds config for evaluation.
        fit_metrics_aggregation_fn: as in FedAvg, called with the used results. The
            default averages numbers.
        evaluate_metrics_aggregation_fn: as in FedAvg, for evaluation.
        timeout: seconds to wait for enough clients, and for their properties.

    Attributes:
        strategy: the strategy itself, with its ``reports``.

    Raises:
        TypeError: an argument does not exist, or belongs to ``strategy``.
        ConfigError: the method exchanges messages inside a round, settings do not fit,
            or an argument has the wrong type.
    """

    def __init__(
        self,
        strategy: Strategy,
        initial_arrays: ArrayRecord,
        *,
        num_rounds: int | None = None,
        evaluate_fn: EvaluateFn | None = None,
        on_fit_config_fn: ConfigFn | None = None,
        on_evaluate_config_fn: ConfigFn | None = None,
        fit_metrics_aggregation_fn: MetricsFn | None = None,
        evaluate_metrics_aggregation_fn: MetricsFn | None = None,
        timeout: float = 3600,
        **legacy: Any,
    ) -> None:
        refuse_legacy_names(legacy)
        super().__init__(**legacy)
        _prepare(strategy, initial_arrays, num_rounds, timeout)
        self.strategy = strategy
        self._names = list(initial_arrays)
        self._initial = initial_arrays
        self._evaluate_fn = evaluate_fn
        self._fit_config = on_fit_config_fn or (lambda _: {})
        self._evaluate_config = on_evaluate_config_fn or (lambda _: {})
        self._fit_metrics = fit_metrics_aggregation_fn
        self._evaluate_metrics = evaluate_metrics_aggregation_fn
        self._ids = _NodeIds()
        self._sent: dict[int, Message] = {}  # sent messages by node id
        # Error reply of each client whose training failed, by node id.
        self._failed: dict[int, Message] = {}
        self._fitting = 0  # round whose results are not yet aggregated
        self._fits = 0

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters:
        """Return the initial arrays. The loop calls this first."""
        # start_simulation gives the process no identity, but messages need one.
        identify_process(secrets.randbits(63))
        # If the loop calls this again, the same strategy begins a second run.
        self._fits += 1
        if self._fits > 1:
            run = self.strategy.run
            self.strategy.prepare(
                self._initial, run.start.num_rounds, run.start.timeout
            )
        # Give each run its own id, because another run on the same nodes may use
        # another strategy object or another process.
        self.strategy.run.start.start_id = secrets.token_hex(8)
        return _parameters(self._initial)

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Return the strategy's training messages as FitIns."""
        self._end_halted_fit()
        # Secure aggregation gives only an average, which some methods cannot use.
        if not self.strategy.reports and calling_object(SECURE_WORKFLOWS):
            refuse_under_secure_aggregation(self.strategy)
        opened = self._configure(
            self.strategy.configure_train,
            server_round,
            parameters,
            self._fit_config(server_round),
            client_manager,
            FitIns,
        )
        # Without messages, the loop does not call aggregate_fit, so end the round here.
        if opened:
            self._fitting = server_round
        else:
            self._fitting = 0
            self.strategy.aggregate_train(server_round, [])
        return opened

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: Failures,
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Return the aggregated model, or None if it is unchanged, and the metrics."""
        self._fitting = 0
        run = self.strategy.run

        # Under secure aggregation, every result is the same average over all clients.
        secure = calling_object(SECURE_WORKFLOWS)
        weights = [res.num_examples for _, res in results]
        average: dict[str, ArrayRecord] = {}

        def reply(message: Message, res: FitRes) -> Message:
            arrays = parameters_to_ndarrays(res.parameters)
            made = reply_to_fit(message, arrays, res.num_examples, res.metrics)
            if secure:
                # Make the average once, and share it between all replies.
                for key, record in made.content.array_records.items():
                    if key not in average:
                        average[key] = to_record(
                            restored(from_record(record), run, weights, secure)
                        )
                    made.content[key] = average[key]
            return made

        # The strategy refuses bad replies, and the project's function gets the others.
        rejected_before = dict(run.report.rejected)
        replies = self._replies(reply, results, failures)
        arrays, averaged = self.strategy.aggregate_train(server_round, replies)
        metrics: dict[str, Any] = dict(averaged or {})
        if arrays is None:
            return None, metrics
        if self._fit_metrics:
            metrics = self._summed_up(self._fit_metrics, results, rejected_before)
        return _parameters(arrays), metrics

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, EvaluateIns]]:
        """Return the strategy's evaluation messages as EvaluateIns."""
        self._end_halted_fit()
        opened = self._configure(
            self.strategy.configure_evaluate,
            server_round,
            parameters,
            self._evaluate_config(server_round),
            client_manager,
            EvaluateIns,
        )
        # Without messages, the loop does not call aggregate_evaluate, so end the tests
        # here.
        if not opened:
            self.strategy.aggregate_evaluate(server_round, [])
        return opened

    def aggregate_evaluate(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, EvaluateRes]],
        failures: Failures,
    ) -> tuple[float | None, dict[str, Scalar]]:
        """Return the averaged loss and metrics."""

        def reply(message: Message, res: EvaluateRes) -> Message:
            return reply_to_evaluate(message, res.loss, res.num_examples, res.metrics)

        rejected_before = dict(self.strategy.run.report.rejected)
        replies = self._replies(reply, results, failures)
        averaged = self.strategy.aggregate_evaluate(server_round, replies)
        metrics: dict[str, Any] = dict(averaged or {})
        loss = metrics.pop(LOSS, None)
        if self._evaluate_metrics:
            fn = self._evaluate_metrics
            metrics = self._summed_up(fn, results, rejected_before)
        return loss, metrics

    def evaluate(
        self, server_round: int, parameters: Parameters
    ) -> tuple[float, dict[str, Scalar]] | None:
        """Return the result of ``evaluate_fn``, or None without the function."""
        if self._evaluate_fn is None:
            return None
        # A method may test other values than those used in training.
        arrays = self.strategy.for_evaluate_fn(server_round, self._record(parameters))
        found = self._evaluate_fn(server_round, list(from_record(arrays).values()), {})
        # A non-finite loss is a divergence, except before round 1: the model is then
        # the project's own, and nothing has been trained.
        if found is not None and server_round:
            # Flower does not read the loss: it may be a tensor, or a list of one.
            loss = float(torch.as_tensor(found[0]).sum())
            losses = losses_not_finite({"": {LOSS: loss}})
            note_losses(self.strategy.run, losses)
        return found

    def _record(self, parameters: Parameters) -> ArrayRecord:
        arrays = zip(self._names, parameters_to_ndarrays(parameters), strict=True)
        return ArrayRecord({name: FlowerArray(array) for name, array in arrays})

    def _summed_up(
        self,
        fn: MetricsFn,
        results: Sequence[tuple[ClientProxy, Any]],
        before: dict[int, str],
    ) -> dict[str, Scalar]:
        """Return the result of the project's ``fn`` for the accepted results.

        Args:
            fn: the project's function.
            results: results of the clients.
            before: replies that this round rejected before these results, by node.
        """
        rejected = self.strategy.run.report.rejected
        used = []
        for proxy, res in results:
            node_id = self._ids.of(proxy)
            if rejected.get(node_id) != before.get(node_id):
                continue
            # Leave out the mod's keys, because the project does not use them.
            own = {k: v for k, v in res.metrics.items() if k not in CLIENT_KEYS}
            used.append((res.num_examples, own))
        if not used:
            return {}
        return fn(used)

    def _configure(
        self,
        configure: Callable[[int, ArrayRecord, ConfigRecord, Grid], Iterable[Message]],
        server_round: int,
        parameters: Parameters,
        config: dict[str, Scalar],
        client_manager: ClientManager,
        kind: type[Ins],
    ) -> list[tuple[ClientProxy, Ins]]:
        """Return a round's messages as clients with their instructions."""
        # Let the strategy ask for nodes and make messages, as in the Message API.
        grid = _ManagerGrid(client_manager, self.strategy, self._ids)
        record = self._record(parameters)
        messages = configure(server_round, record, ConfigRecord(dict(config)), grid)
        self._sent = {message.metadata.dst_node_id: message for message in messages}
        self._failed.clear()

        # Clients may leave meanwhile. A client that has left fails in ``_replies``.
        proxies = self._ids.connected(client_manager)
        opened: list[tuple[ClientProxy, Ins]] = []
        for node_id, message in self._sent.items():
            if node_id in proxies:
                arrays, client_config = open_message(message)
                proxy = _NamingProxy(proxies[node_id], message, self._failed)
                ins = kind(ndarrays_to_parameters(arrays), client_config)
                opened.append((proxy, ins))
        return opened

    def _end_halted_fit(self) -> None:
        """Report a round whose training ended without results.

        Secure aggregation has halted, or a wrapper did not pass on the results because
        a client failed.
        """
        server_round = self._fitting
        if server_round:
            self._fitting = 0
            self.strategy.aggregate_train(server_round, list(self._failed.values()))

    def _replies(
        self,
        reply: Callable[[Message, Any], Message],
        results: Sequence[tuple[ClientProxy, Any]],
        failures: Failures,
    ) -> list[Message]:
        """Return the results as replies, with an error reply for each failure."""
        named = [failure for failure in failures if isinstance(failure, tuple)]
        replies = []
        heard: set[int] = set()
        for proxy, res in [*results, *named]:
            node_id = self._ids.of(proxy)
            heard.add(node_id)
            message = self._sent[node_id]
            if res.status.code is not Code.OK:
                failed = app_error(message, res.status.message)
                replies.append(self._failed.get(node_id, failed))
                continue
            try:
                replies.append(reply(message, res))
            except Exception as error:  # a client's result may cause any exception
                reason = str(error) or type(error).__name__
                replies.append(app_error(message, reason))

        # A workflow passes failures without their clients. Therefore each missing
        # client gets all of the reasons, without repetitions.
        unnamed = [failure for failure in failures if not isinstance(failure, tuple)]
        if unnamed:
            reasons = "; or: ".join(dict.fromkeys(map(_reason, unnamed)))
            missing = self._sent.keys() - heard
            replies += [app_error(self._sent[node], reasons) for node in missing]
        return replies


def _reason(failure: BaseException) -> str:
    error = next(iter(failure.args), None)
    if isinstance(error, Error):
        return str(error.reason)
    return str(failure)


to_legacy = LegacyStrategy
"""Name for use in an app. To define a subclass, derive from ``LegacyStrategy``."""


class _NodeIds:
    """The node id of each client, for all names that the loop gives to clients."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def of(self, proxy: ClientProxy) -> int:
        """Return Flower's id of the client's node.

        ``start_server`` has no nodes. The id is then the number of the
        client in the order of connections.
        """
        own: int | None = getattr(proxy, "node_id", None)
        if own is not None:
            return own
        return self._numbers.setdefault(proxy.cid, len(self._numbers) + 1)

    def connected(self, manager: ClientManager) -> dict[int, ClientProxy]:
        """Return the connected clients by node id."""
        return {self.of(proxy): proxy for proxy in dict(manager.all()).values()}


class _NamingProxy(ClientProxy):
    """A client whose exceptions become results with the error.

    The loop does not report the client that raised an exception.

    Args:
        proxy: Flower's proxy.
        message: the client's message in this round; the workflows address the client
            by its node.
        failed: receives the error reply, because a wrapper may not pass on the result.
    """

    def __init__(
        self, proxy: ClientProxy, message: Message, failed: dict[int, Message]
    ) -> None:
        super().__init__(proxy.cid)
        self.node_id = message.metadata.dst_node_id
        self._message = message
        self._proxy = proxy
        self._failed = failed

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        try:
            res = self._proxy.fit(ins, timeout, group_id)
        except Exception as error:
            self._failed[self.node_id] = proxy_error(self._message, error)
            # Use this code, because Flower has no code for an exception.
            status = Status(Code.FIT_NOT_IMPLEMENTED, str(error))
            return FitRes(status, Parameters([], ""), 0, {})
        if res.status.code is not Code.OK:
            failed = app_error(self._message, res.status.message)
            self._failed[self.node_id] = failed
        return res

    def evaluate(
        self, ins: EvaluateIns, timeout: float | None, group_id: int | None
    ) -> EvaluateRes:
        try:
            return self._proxy.evaluate(ins, timeout, group_id)
        except Exception as error:
            self._failed[self.node_id] = proxy_error(self._message, error)
            status = Status(Code.EVALUATE_NOT_IMPLEMENTED, str(error))
            return EvaluateRes(status, 0.0, 0, {})

    def get_properties(self, *args: Any, **kwargs: Any) -> Any:
        return self._proxy.get_properties(*args, **kwargs)

    def get_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self._proxy.get_parameters(*args, **kwargs)

    def reconnect(self, *args: Any, **kwargs: Any) -> Any:
        return self._proxy.reconnect(*args, **kwargs)


class _ManagerGrid(ImmediateGrid):
    """The parts of a Grid that configure a round."""

    def __init__(
        self, client_manager: ClientManager, strategy: Strategy, ids: _NodeIds
    ) -> None:
        self._manager = client_manager
        self._strategy = strategy
        self._ids = ids

    def get_node_ids(self) -> list[int]:
        return list(self._ids.connected(self._manager))

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Return the clients' properties, or error replies if a client fails."""
        # Refuse other messages, because the loop only has fit, evaluate and this query.
        batch = list(messages)
        for message in batch:
            own = merged_config(message).keys() - {SERVER_ROUND}
            if message.metadata.message_type != MessageType.QUERY or own:
                self._refuse_messages()
        proxies = self._ids.connected(self._manager)

        def ask(message: Message) -> Message:
            silent = app_error(message, "no properties")
            try:
                res = proxies[message.metadata.dst_node_id].get_properties(
                    GetPropertiesIns(merged_config(message)), timeout, None
                )
            # The client has left, or Flower's proxy raises the client's exception.
            except Exception:
                return silent
            # A client without ``get_properties`` has not failed.
            if res.status.code is Code.GET_PROPERTIES_NOT_IMPLEMENTED:
                return describe(message, {})
            if res.status.code is not Code.OK:
                return silent
            return describe(message, dict(res.properties))

        # Use threads, because each proxy waits for its client.
        with ThreadPoolExecutor() as pool:
            return list(pool.map(ask, batch))

    def push_messages(self, messages: Iterable[Message]) -> NoReturn:
        self._refuse_messages()

    def _refuse_messages(self) -> NoReturn:
        raise ConfigError(
            f"strategy {self._strategy.name!r} sends additional messages between the"
            f" rounds' fit and evaluate, {_BUT} Give the NumPyClient to"
            " client_app(client_fn)."
        )

    def pull_messages(self, *args: Any, **kwargs: Any) -> list[Message]:
        return []

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError


def _prepare(
    strategy: Strategy,
    initial_arrays: ArrayRecord,
    num_rounds: int | None,
    timeout: float,
) -> None:
    """Prepare the strategy for a run.

    Raises:
        ConfigError: as ``LegacyStrategy``.
    """
    # Refuse settings that this loop cannot run, with an alternative.
    if not isinstance(strategy, Strategy):
        raise ConfigError(
            "to_legacy takes a strategy of fedbn_flwr.strategies, but"
            f" strategy={strategy!r:.80} is not one. Write to_legacy(FedBN(), arrays),"
            " with the brackets"
        )
    raise_or_warn(found_problems(ROWS, strategy.methods, Known()))
    after = strategy.prepare(initial_arrays, num_rounds, timeout)
    if after:
        raise ConfigError(
            "Flower's legacy loop starts with round 1 and cannot continue after round"
            f" {after}."
        )
    if type(strategy.protection) is not Protection:
        raise ConfigError(
            "differential privacy works only on Flower's Message API. The legacy loop"
            " passes the clients' metrics to the project's functions, and secure"
            " aggregation gives averages of updates that were not clipped"
        )


def _parameters(arrays: ArrayRecord) -> Parameters:
    return ndarrays_to_parameters(list(from_record(arrays).values()))


# --- what may be wrong ----------------------------------------------------------------
_BUT = (
    "but Flower's legacy loop has only one fit and one evaluate per round. Start the"
    " strategy from the Message API's ServerApp."
)
ROWS = (
    Problem(
        "legacy-loop-train-only",
        "train_only sends the other entries once, and again to a client that has lost"
        f" them, {_BUT} Or call fedbn_flwr.train_only(model, [...]) in the client"
        " instead, and everything is sent.",
        "train_only",
        when=lambda methods, known: methods.params.train_only,
    ),
    Problem(
        "legacy-loop-exchanges",
        "strategy {method.name!r} exchanges statistics with its clients inside a local"
        f" step, {_BUT} Keep the NumPyClient, with rules.step(...) around its steps and"
        " a get_properties that returns num-examples and batch-size. Then pass it to"
        " fedbn_flwr.client_app(client_fn, mods=[bn_mod]).",
        "strategy",
        when=lambda methods, known: methods.all_phases.exchanges,
    ),
    Problem(
        "legacy-loop-re-estimates",
        "strategy {method.name!r} collects BN statistics from its clients outside the"
        f" training (re-estimation, class-moments), {_BUT} A NumPyClient has no method"
        " that measures statistics. Make the client a TorchClient in fedbn_flwr.client_app(client_fn), or use an app of"
        " the Message API with answer_statistics.",
        "strategy",
        when=lambda methods, known: (
            methods.reestimates
            or RECALIBRATED in methods.tests
            or methods.all_phases.class_moments
        ),
    ),
)
