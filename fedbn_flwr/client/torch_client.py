"""``TorchClient``: a NumPyClient around local training."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from flwr.app import Context
from flwr.client import NumPyClient
from torch import nn
from torch.utils.data import Dataset

from fedbn_flwr.batchnorm.averaging import Array, State
from fedbn_flwr.batchnorm.parts import Parts
from fedbn_flwr.batchnorm.reestimation import reestimate_statistics
from fedbn_flwr.batchnorm.sync import try_synchronised_step
from fedbn_flwr.client.lent_models import BuildModel, LentModel, lender, two_inputs
from fedbn_flwr.client.local_state import LocalState
from fedbn_flwr.client.received import Received, entries_that_stay, load_received
from fedbn_flwr.client.replay_log import clear_log, log_answer, replay
from fedbn_flwr.client.state_folder import state_dir
from fedbn_flwr.errors import ConfigError, DataError, NormLayerError, StateError
from fedbn_flwr.messages.moments import encode_moments
from fedbn_flwr.messages.numpy_client import Config
from fedbn_flwr.messages.protocol import (
    APPLIED,
    ARRAY_NAMES,
    BATCH_SIZE,
    DROPPED_BATCHES,
    EXAMPLES_PROCESSED,
    EXAMPLES_TESTED,
    EXCHANGE,
    MASK_PRESENT,
    MOD,
    NUM_EXAMPLES,
    PARTITION_ID,
    SERVER_ROUND,
    STEPS,
    SYNCHRONISES,
    TRAIN_ACCURACY,
    TRAIN_LOSS,
    VALIDATION,
    EvaluateConfig,
    MessageConfig,
    TrainConfig,
    partition_of,
    round_in,
)
from fedbn_flwr.messages.records import tensors, to_state
from fedbn_flwr.privacy.counters import refuse_cumulative
from fedbn_flwr.seeds import torch_generator
from fedbn_flwr.server.methods.method import HookContext
from fedbn_flwr.strategies import make_hooks
from fedbn_flwr.training.batches import Batches
from fedbn_flwr.training.client_hook import ClientHook
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.inputs import inputs_for
from fedbn_flwr.training.loaded import as_batches
from fedbn_flwr.training.loop import TrainResult, train
from fedbn_flwr.training.losses import LossFn
from fedbn_flwr.training.settings import LocalTraining
from fedbn_flwr.training.tasks import CLASSIFICATION, Task
from fedbn_flwr.transport import NextExchange, StopStep

__all__ = ["TorchClient"]

logger = logging.getLogger("flwr")


class Trained(NamedTuple):
    """What a client sends after a round of training; the arrays share the model's
    memory.
    """

    arrays: list[Array]
    num_examples: int
    metrics: Config


class TorchClient(NumPyClient):
    """Trains and evaluates a torch model for any strategy of this package, in any
    engine.

    Args:
        model: the model on its device; it is trained in place. It may be compiled or in
            DDP: sent and kept entries have the names of the inner module, or the
            received names. Or a function that builds it: a process calls it once, again
            only for clients that work at the same time, and lends the model to one
            client after another. Pass the same function object for every message.
        train_data: the client's training data, a torch ``Dataset`` of (input, target)
            with a length, or ``Batches``, as ``training.batches_of(loader)`` makes them
            of a loader with a ``collate_fn``; may be empty for a client that only
            evaluates. Batches and their order are those of the settings. An input may
            be several tensors in a tuple, a list or a dict: the model is called with
            this one structure.
        test_data: one test set, or several by name (their metrics are then called
            ``<name>-accuracy``, ...).
        settings: steps, batch size, optimizer.
        context: Flower's context from ``client_fn(context)``; its ``state`` holds what
            a method keeps with the client, its ``node_config["partition-id"]`` names
            the client.
        partition_id: replaces the partition id of the context.
        seed: batches, augmentation and dropout use streams of (seed, round, partition
            id). Without a partition id they use the context's node id, which changes in
            every run. None = the strategy's seed, 0 under a strategy that sends none.
        task: ``CLASSIFICATION``, ``BINARY``, ``MULTI_LABEL``, ``REGRESSION`` or
            ``SEGMENTATION`` of ``fedbn_flwr.training``: targets, loss and metrics.
            ``dataclasses.replace(task, loss=...)`` has a loss of your own,
            ``task.measuring(["auroc"])`` further metrics.
        training_loss: the loss of training steps; None = that of the task, as in tests.
        validation_data: a part of the client's examples that it does not train on; it
            is the test set "validation", and FedBS may weigh the client by its loss
            there.
        state_dir: folder for durable copies of what a method keeps with the client,
            used if the server sends its run. They remain after the node's process and
            the run. A partition id is needed. A function opens a folder on another
            machine. None = the ``state-dir`` that the context's node config or run
            config names, if any.
        plain_train_data: the training examples in the same order without random
            transforms, where ``train_data`` is a ``Dataset`` that has them. BatchNorm's
            statistics are measured on these (HBN, FBN and BN-SCAFFOLD by a pass,
            StaticBN, ``recalibrate``). None = ``train_data``.

    ``fit`` and ``evaluate`` take the entries named in
    ``config["fedbn-flwr.array-names"]`` (a JSON list) or, without it, the whole state
    dict in its order. ``fit`` needs the round, ``config["server-round"]``; it returns
    the shared entries, and names them in its metrics if they are not all.
    """

    def __init__(
        self,
        model: nn.Module | BuildModel,
        train_data: Batches | Dataset[Any],
        test_data: Batches | Dataset[Any] | Mapping[str, Batches | Dataset[Any]],
        settings: LocalTraining,
        *,
        context: Context | None = None,
        partition_id: int | None = None,
        seed: int | None = None,
        task: Task = CLASSIFICATION,
        training_loss: LossFn | None = None,
        state_dir: Path | None = None,
        validation_data: Batches | Dataset[Any] | None = None,
        plain_train_data: Dataset[Any] | None = None,
    ) -> None:
        self.model = model
        self.train_data = as_batches(train_data, plain_train_data)
        named = test_data if isinstance(test_data, Mapping) else {"": test_data}
        if validation_data is not None:
            named = {**named, VALIDATION: validation_data}
        self.test_sets = {name: as_batches(data) for name, data in named.items()}
        self.settings = settings
        self._lend = lender(
            model,
            functools.partial(two_inputs, [self.train_data, *self.test_sets.values()]),
        )
        self.context = context
        if partition_id is None and context is not None:
            partition_id = partition_of(context)
        self.partition_id = partition_id
        self.seed = seed
        self.task = task
        self._training_task = (
            task if training_loss is None else replace(task, loss=training_loss)
        )
        self.state_dir = state_dir

    @property
    def parts(self) -> Parts:
        """The split of the model's state."""
        with self._lend() as lent:
            return lent.parts

    def get_properties(self, config: Config) -> Config:
        """Return ``num-examples`` of the training set, ``batch-size`` of its first step
        and the ``partition-id``.

        Raises:
            NormLayerError: the method synchronises BN layers, and this model's cannot
                be.
        """
        if config.get(SYNCHRONISES) and len(self.train_data):
            with self._lend() as lent:
                self._try_synchronised_step(lent)
        known: Config = (
            {} if self.partition_id is None else {PARTITION_ID: self.partition_id}
        )
        size = len(self.train_data)
        return {
            **known,
            NUM_EXAMPLES: size,
            BATCH_SIZE: self.settings.first_batch(size),
        }

    def _try_synchronised_step(self, lent: LentModel) -> None:
        if lent.tried:
            return
        some = torch.arange(min(2, len(self.train_data)))
        try:
            inputs = inputs_for(lent.plain)(self.train_data.batch(some)[0])
            try_synchronised_step(lent.plain, inputs, len(some))
            lent.tried = True
        except NormLayerError:
            raise
        # user code may raise anything; if training raises it too, the server hears of
        # it
        except Exception as error:
            logger.warning(
                "the model could not be tried in a synchronised step: %s: %s",
                type(error).__name__,
                error,
            )

    def get_parameters(self, config: Config) -> list[Array]:
        """Return the whole state dict, in its order."""
        with self._lend() as lent:
            return [array.copy() for array in to_state(lent.state).values()]

    def fit(
        self, parameters: list[Array], config: Config
    ) -> tuple[list[Array], int, Config]:
        """Train for one round.

        Returns:
            The shared entries, the size of the training set |D_i| (not the examples
            processed), and the metrics ``train-loss``, ``train-accuracy`` (not for a
            regression), ``examples-processed``, ``steps``, ``dropped-batches`` and
            those of the client hooks.

        Under FedTAN by messages it returns the one array of the next exchange, named
        ``fedtan/TAG``, until the synchronised step has all answers, and no array when
        it has.

        Raises:
            StateError: the arrays or the kept entries do not fit the model.
            DataError: there is nothing to train on.
            ConfigError: the config names no round.
            NormLayerError: the server asks for masked sums, and a BatchNorm layer has
                ``momentum=None``.
        """
        arrays, num_examples, metrics = self.fit_uncopied(parameters, config)
        return [array.copy() for array in arrays], num_examples, metrics

    def fit_uncopied(
        self, parameters: list[Array], config: Config
    ) -> tuple[list[Array], int, Config]:
        """Do ``fit``, and return arrays that share the model's memory: copy them before
        the next message.
        """
        result = self.train(parameters, config)
        if isinstance(result, Trained):
            return result
        names = [f"{EXCHANGE}/{tag}" for tag in result.tensors]
        arrays = [tensor.cpu().numpy() for tensor in result.tensors.values()]
        return arrays, len(self.train_data), {ARRAY_NAMES: json.dumps(names)}

    def train(self, parameters: list[Array], config: Config) -> Trained | NextExchange:
        """Train for one round; by messages a synchronised step may need an exchange
        before it can go on.
        """
        with self._lend() as lent:
            try:
                return self._train(lent, parameters, config)
            except StopStep as stop:
                return stop.exchange

    def _train(
        self, lent: LentModel, parameters: list[Array], config: Config
    ) -> Trained:
        if round_in(config) is None:
            raise ConfigError(
                f"the config of fit has no '{SERVER_ROUND}', by which a client draws"
                " other batches in each round. Flower's legacy strategies send none by"
                " themselves: give yours on_fit_config_fn=lambda server_round:"
                f" {{'{SERVER_ROUND}': server_round}}"
            )
        if MASK_PRESENT in config:
            refuse_cumulative(lent.plain, "masked-sums=true")
        sent = TrainConfig.read(config)
        local = entries_that_stay(lent, sent.local_entries)
        store = self._store(lent, config, sent)
        if sent.attempt is not None:
            parameters, config = log_answer(self.context, parameters, config)
        replayed = replay(self.context, config)
        hooks = make_hooks(
            sent.hooks,
            HookContext(config, frozenset(local), replayed, self._validation_loss),
        )
        extras, prefix = load_received(lent, parameters, config, store.load(local))
        for hook in hooks.values():
            hook.receive(extras, tensors(store.hook_state(type(hook).__name__)))
        result = train(
            lent.model,
            self.train_data,
            self.settings,
            learning_rate=self.settings.learning_rate.at(
                sent.server_round, sent.frozen
            ),
            stream=functools.partial(self._stream, sent, fresh=sent.fresh_batches),
            hooks=list(hooks.values()),
            task=self._training_task,
            layout=lent.layout,
        )
        clear_log(self.context)
        state = to_state(lent.state)
        _keep(
            store,
            {name: state[name] for name in local},
            hooks.values(),
            sent.server_round,
        )
        metrics = _metrics(result)
        if hooks:
            metrics[APPLIED] = ",".join(hooks)
        metrics |= store.reply_metadata(sent.server_round)
        returned = _returned(state, local, hooks.values(), prefix)
        if ARRAY_NAMES in config or len(returned) != len(state):
            metrics[ARRAY_NAMES] = json.dumps(list(returned))
        return Trained(list(returned.values()), len(self.train_data), metrics)

    def _validation_loss(self, model: nn.Module) -> float:
        """Return the model's loss on the validation data.

        Raises:
            DataError: there are none.
        """
        data = self.test_sets.get(VALIDATION)
        if data is None or len(data) == 0:
            raise DataError(
                "the strategy weighs this client by the loss on its validation data, of"
                " which it has none: use a larger validation-share, or pass"
                " validation_data= to TorchClient"
            )
        return evaluate(model, data, task=self.task).loss

    def evaluate(
        self, parameters: list[Array], config: Config
    ) -> tuple[float, int, Config]:
        """Evaluate the received entries, completed with the kept ones, on each test
        set.

        Returns:
            Mean loss on the first test set that is not empty, its size, and for each
            set the metrics ``<name>-loss``, ``<name>-num-examples`` and those of the
            task, such as ``<name>-accuracy`` (no prefix for a single unnamed set); of
            an empty set only its size. NaN where a test set does not define a metric.

        Raises:
            ConfigError: a test set is not known here.
        """
        sent = EvaluateConfig.read(config)
        if unknown := [name for name in sent.test_sets if name not in self.test_sets]:
            known = (
                ", ".join(name or "one without a name" for name in self.test_sets)
                or "none"
            )
            raise ConfigError(
                f"this client has no test set {unknown[0]!r}; it has {known}. Leave"
                f" personal-{unknown[0]} out of eval-on, or give the TorchClient this"
                f" set: test_data={{{unknown[0]!r}: ...}}"
            )
        metrics: Config = {}
        first: tuple[float, int] | None = None
        with self._lend() as lent:
            self._load(lent, parameters, config, sent)
            for name in sent.test_sets or self.test_sets:
                prefix, count = (
                    (f"{name}-", f"{name}-{NUM_EXAMPLES}")
                    if name
                    else ("", EXAMPLES_TESTED)
                )
                if len(self.test_sets[name]) == 0:
                    metrics[count] = 0
                    continue
                result = evaluate(lent.model, self.test_sets[name], task=self.task)
                metrics |= {**result.named(prefix), count: result.num_examples}
                first = first or (result.loss, result.num_examples)
        loss, num_examples = first or (float("nan"), 0)
        return loss, num_examples, metrics

    def statistics(
        self, parameters: list[Array], config: Config
    ) -> tuple[list[Array], int, Config]:
        """Re-estimate BN statistics under the received weights, in one pass over the
        training data.

        Returns:
            ``PATH.count``, ``PATH.mean`` and ``PATH.m2`` of each BN layer, the size of
            the training set, and their names in ``fedbn-flwr.array-names``. See
            ``batchnorm.reestimation``; nothing is kept.
        """
        sent = MessageConfig.read(config)
        with self._lend() as lent:
            prefix = self._load(lent, parameters, config, sent).prefix
            seed = self._stream(sent, "statistics").initial_seed()
            batch_size = self.settings.batch_size
            moments = reestimate_statistics(
                lent.plain, self.train_data, batch_size=batch_size, seed=seed
            )
            entries = to_state(encode_moments(moments, lent.state))
        names = json.dumps([prefix + name for name in entries])
        return list(entries.values()), len(self.train_data), {ARRAY_NAMES: names}

    def _stream(
        self, sent: MessageConfig, purpose: str, fresh: int = 0
    ) -> torch.Generator:
        """Return the generator for a purpose in this round; ``fresh``: the attempt that
        draws new batches, or 0.
        """
        key: int | str = -1 if self.partition_id is None else self.partition_id
        if self.partition_id is None and self.context is not None:
            # clients on one stream would draw the same
            key = f"node {self.context.node_id}"
        attempt = [fresh] if fresh else []
        seed = sent.seed if self.seed is None else self.seed
        return torch_generator(seed, purpose, sent.server_round, key, *attempt)

    def _store(
        self, lent: LentModel, config: Config, sent: MessageConfig
    ) -> LocalState:
        """Return the client's kept state, restored to the one that the server expects."""
        if MOD in config:
            raise StateError(
                f"the app has the mod {config[MOD]}, and its client is a TorchClient,"
                " which keeps and sends its part itself. Leave the mod out."
            )
        store = LocalState(self.context, lent.parts, lent.fingerprint, sent.start_id)
        if sent.continuity is not None:
            folder = self.state_dir or (
                state_dir(self.context) if self.context else None
            )
            if folder is not None:
                if self.partition_id is None:
                    raise StateError(
                        "state_dir needs a partition id: pass partition_id=, or a"
                        " context that names it"
                    )
                store.attach(folder, sent.continuity, self.partition_id)
        store.restore(sent.local_sha256, sent.used_sha256)
        return store

    def _load(
        self,
        lent: LentModel,
        parameters: list[Array],
        config: Config,
        sent: MessageConfig,
    ) -> Received:
        """Load the received and the kept entries for a pass without training."""
        store = self._store(lent, config, sent)
        return load_received(
            lent,
            parameters,
            config,
            store.load(entries_that_stay(lent, sent.local_entries)),
        )


def _keep(
    store: LocalState, kept: State, hooks: Iterable[ClientHook], server_round: int
) -> None:
    """Keep the client's own entries of the model and those of its hooks until the next
    round.
    """
    if kept:
        store.keep(kept, server_round)
    store.save_hook_state(
        {type(hook).__name__: to_state(hook.keep()) for hook in hooks}, server_round
    )
    store.save(server_round)


def _metrics(result: TrainResult) -> Config:
    """Return what a reply says of the training."""
    metrics: Config = {TRAIN_LOSS: result.loss}
    if result.accuracy is not None:
        metrics[TRAIN_ACCURACY] = result.accuracy
    metrics[EXAMPLES_PROCESSED] = result.num_processed
    metrics[STEPS] = result.num_steps
    metrics[DROPPED_BATCHES] = result.num_dropped
    return {**metrics, **result.metrics}


def _returned(
    state: State, local: Collection[str], hooks: Iterable[ClientHook], prefix: str
) -> dict[str, Array]:
    """Return the entries of the reply under the server's names: the shared ones, and
    the records of the hooks.
    """
    returned = {
        prefix + name: array for name, array in state.items() if name not in set(local)
    }
    for hook in hooks:
        for record, entries in hook.reply().items():
            returned |= {
                f"{record}/{prefix}{name}": array
                for name, array in to_state(entries).items()
            }
    return returned
