"""``TorchClient`` is a NumPyClient around local training.

A message from the server contains the shared entries of the model. The client adds its
local state, trains or tests the model, stores its local state, and returns the shared
entries.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import cast

import torch
from flwr.app import Context
from flwr.client import NumPyClient
from torch import nn

from fedbn_flwr.batchnorm.array_types import Array
from fedbn_flwr.batchnorm.class_moments import ClassMoments, class_moments
from fedbn_flwr.batchnorm.parts import refuse_other_layers
from fedbn_flwr.batchnorm.reestimation import (
    Moments,
    load_statistics,
    reestimate_statistics,
)
from fedbn_flwr.batchnorm.train_only import warn_if_moved
from fedbn_flwr.client.client_data import (
    ClientData,
    ClientStreams,
    Examples,
    as_batches,
)
from fedbn_flwr.client.kept import KeptState, hand_over, kept_by
from fedbn_flwr.client.model_door import (
    BuildModel,
    Door,
    LentModel,
    TaskOfModel,
    entries_that_stay,
    load_received,
    returned_entries,
    try_step,
)
from fedbn_flwr.client.named_hooks import make_hooks, refuse_on_client
from fedbn_flwr.client.own_loop import train_by
from fedbn_flwr.client.replay_log import clear_log, log_answer, reducer_of
from fedbn_flwr.errors import ConfigError, OneExampleError, StateError
from fedbn_flwr.messages.moment_record import (
    COUNTS,
    encode_moments,
    encode_moments_of_classes,
)
from fedbn_flwr.messages.numpy_client import Config
from fedbn_flwr.messages.protocol import (
    APPLIED,
    ARRAY_NAMES,
    BATCH_SIZE,
    CLASS_MOMENTS,
    DROPPED_BATCHES,
    EXAMPLES_PROCESSED,
    EXAMPLES_TESTED,
    EXCHANGE,
    KEPT_STATES,
    MOD,
    NUM_EXAMPLES,
    PARTITION_ID,
    SERVER_ROUND,
    SITE_NAME,
    STEPS,
    SYNCHRONISES,
    TEST_SETS,
    TRAIN_ACCURACY,
    TRAIN_LOSS,
    MessageConfig,
    TrainConfig,
    comma_list,
    own_node_id,
    partition_of,
    round_in,
    site_name_of,
)
from fedbn_flwr.messages.records import to_state
from fedbn_flwr.problems import Known
from fedbn_flwr.training.batches import inputs_for, refuse_not_finite, with_positions
from fedbn_flwr.training.client_hook import ClientHook, NamedHooks, overrides
from fedbn_flwr.training.evaluation import EvalResult, evaluate
from fedbn_flwr.training.loop import TrainResult, train
from fedbn_flwr.training.model_state import compiled_modules, load_state, named_by_state
from fedbn_flwr.training.not_finite import refuse_first_pass
from fedbn_flwr.training.settings import LocalTraining
from fedbn_flwr.training.tasks import CLASSIFICATION, Task
from fedbn_flwr.transport import RetryStep, StopStep
from fedbn_flwr.transport.hook_context import HookContext

logger = logging.getLogger("flwr")


class TorchClient(NumPyClient):
    """Trains and evaluates a torch model for any strategy of this package.

    It works in any engine.

    Example::

        >>> import torch
        >>> from torch import nn
        >>> from torch.utils.data import TensorDataset
        >>> from fedbn_flwr import TorchClient
        >>> from fedbn_flwr.training import LearningRate, LocalTraining
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        >>> data = TensorDataset(torch.randn(16, 4), torch.arange(16) % 2)
        >>> training = LocalTraining(learning_rate=LearningRate(0.1), local_steps=5)
        >>> client = TorchClient(model, data, data, training, partition_id=0)
        >>> state = [entry.numpy() for entry in model.state_dict().values()]
        >>> trained, num_examples, metrics = client.fit(state, {"server-round": 1})
        >>> num_examples, metrics["steps"]
        (16, 5)

    Args:
        model: the function that builds the model on its device, called for each model
            that a message needs. Or the model, which then belongs to this client
            object, and has its values as before after each message. It may be wrapped
            in DDP: sent and kept entries have the names of the inner module, or the
            received names.
        train_data: the client's training data, a torch ``Dataset`` of (input, target)
            with a length, or ``Batches``. ``training.batches_of(loader)`` makes
            ``Batches`` from a loader with a ``collate_fn``. It may be empty if the
            client only evaluates. The settings determine the batches and their order.
            An input may be several tensors in a tuple, a list or a dict: the model is
            called with this one structure. BatchNorm's statistics (StaticBN, ``recalibrate``) are measured without
            random transforms if ``training.batches_of(loader, plain)`` has the examples
            without them.
        test_data: one test set, or several by name (their metrics are then called
            ``<name>-accuracy``, ...). The set "validation" has examples that the client
            does not train on; FedBS may weigh the client by its loss on them.
        settings: steps, batch size, optimizer.
        context: Flower's context from ``client_fn(context)``. Its ``state`` contains
            the client's local state, and its ``node_config["partition-id"]`` names the
            client.
        partition_id: replaces the partition id of the context.
        seed: batches, augmentation and dropout use streams of (seed, round, partition
            id). Without a partition id they use the context's node id, which changes in
            every run. None uses the strategy's seed, or 0 if the strategy sends none.
        task: ``CLASSIFICATION``, ``BINARY``, ``MULTI_LABEL``, ``REGRESSION`` or
            ``SEGMENTATION`` of ``fedbn_flwr.training``, with targets, loss and metrics.
            Use ``dataclasses.replace(task, loss=...)`` for your own loss, ``replace(
            task, training_loss=...)`` for a loss that only training steps use, and
            ``task.measuring(["auroc"])`` for further metrics. It may be a function that
            makes the task of a model, if the loss has state or refers to the model:
            ``lambda model: replace(CLASSIFICATION, training_loss=MyLoss(model))``.
            An object with state serves one client object, like a model. For targets or
            losses of any other kind, use ``OwnTask``: two functions that call the model.
        state_dir: folder for durable copies of the client's local state, used if the
            server sends the id of its run. The copies outlast the node's process and
            the run, and need a partition id. None uses the ``state-dir`` that the
            context's node config or run config names, if any.
        reuse_model: promises that a message changes nothing in a model but its state
            dict. Then the process uses built models for one message after another, and
            a given model may serve all clients. The first training and the first test
            of a run check this in each process. The function may be written in the
            client function if it refers only to plain values. Compiled models are
            always used again.

    ``fit`` and ``evaluate`` take the entries named in
    ``config["fedbn-flwr.array-names"]`` (a JSON list). If the config names none, they
    take the whole state dict in its order. ``fit`` needs the round,
    ``config["server-round"]``. It returns the shared entries, and names them in its
    metrics if the config names entries, or if they are not all entries.

    Attributes:
        data: the data for training and tests.
        streams: the random streams that draw from the data.
        state_dir: the folder of the local state, or None.
    """

    def __init__(
        self,
        model: nn.Module | BuildModel,
        train_data: Examples,
        test_data: Examples | Mapping[str, Examples],
        settings: LocalTraining,
        *,
        context: Context | None = None,
        partition_id: int | None = None,
        seed: int | None = None,
        task: Task | TaskOfModel = CLASSIFICATION,
        state_dir: Path | None = None,
        reuse_model: bool = False,
    ) -> None:
        if partition_id is None and context is not None:
            partition_id = partition_of(context)
        self.model = model
        self.settings = settings
        self.context = context
        self.partition_id = partition_id
        named = test_data if isinstance(test_data, Mapping) else {"": test_data}
        tests = {name: as_batches(data) for name, data in named.items()}
        self.data = ClientData(as_batches(train_data), tests)
        # A client without a partition id is named by its node. Two clients with the
        # same name would draw the same numbers.
        name: int | str = -1 if partition_id is None else partition_id
        if partition_id is None and context is not None:
            name = f"node {own_node_id(context)}"
        self.streams = ClientStreams(seed, name)
        self.state_dir = state_dir
        example = None if settings.loop else self.data.two_inputs
        self._door = Door(model, task, settings.loop, example, reuse_model)

    def fit(
        self, parameters: list[Array], config: Config
    ) -> tuple[list[Array], int, Config]:
        """Train for one round.

        Returns:
            The shared entries; the size of the training set |D_i| (not the number of
            processed examples); and the metrics ``train-loss``, ``train-accuracy`` (not
            for a regression), ``examples-processed``, ``steps``, ``dropped-batches``
            and the metrics of the client hooks.

        Under FedTAN by messages, it returns only the array of the next exchange, named
        ``fedtan/TAG``, until the synchronised step has all answers. Then it returns no
        array.

        Raises:
            StateError: the arrays or the local state do not fit the model.
            DataError: there is nothing to train on.
            ConfigError: the config names no round.
        """
        returned: dict[str, Array] | None = None
        while returned is None:
            # If another client is lost in a synchronised step, the round begins again
            # with a second model.
            with self._door.lend("training") as lent, suppress(RetryStep):
                try:
                    returned, metrics = self._fit(lent, parameters, config)
                except StopStep as stop:
                    # If a synchronised step exchanges by messages, it stops when it
                    # needs an exchange with the other clients. The answer in the next
                    # message continues the step.
                    returned = {
                        f"{EXCHANGE}/{tag}": tensor.cpu().numpy()
                        for tag, tensor in stop.sent.items()
                    }
                    metrics = {ARRAY_NAMES: json.dumps(list(returned))}
        return list(returned.values()), len(self.data.train), metrics

    def _fit(
        self, lent: LentModel, parameters: list[Array], config: Config
    ) -> tuple[dict[str, Array], Config]:
        """Load the server's model, train it, keep what stays here, and reply."""
        if round_in(config) is None:
            raise ConfigError(
                f"the config of fit has no '{SERVER_ROUND}', but a client needs it to"
                " draw other batches in each round. Flower's legacy strategies do not"
                " send it by default: give yours on_fit_config_fn=lambda server_round:"
                f" {{'{SERVER_ROUND}': server_round}}"
            )
        if len(self.data.train):
            self.data.read_twice(self.streams.client)

        # Load the server's model, except for the entries that stay here.
        sent = TrainConfig.read(config)
        refuse_other_layers(lent.plain, sent.batchnorm)
        local = entries_that_stay(lent, sent)
        if sent.attempt is not None:
            # If this message only has the answer of an exchange, take the model of an
            # earlier message from the log. A client without a context cannot answer
            # here, and fails immediately.
            context = cast(Context, self.context)
            parameters, config = log_answer(context, parameters, config)
        trained = self._training(lent, sent, self.settings, config)
        hooks = self._hooks(lent, sent, config, local, trained) if sent.hooks else {}
        kept = self._open_kept(lent, config, sent, hooks)
        own = kept.load(local) if kept else {}
        extras, prefix, before = load_received(lent, parameters, config, sent, own)

        # Train with the hooks of the method.
        if hooks:
            hand_over(hooks, extras, kept.of_hooks if kept else {})
        result = trained(lent.model, task=lent.task, hooks=hooks)
        if hooks:
            # Check the number of steps taken, because dropped batches are not steps.
            refuse_on_client(sent.hooks, config, Known(local_steps=result.num_steps))
        if not math.isfinite(result.loss) and not compiled_modules(lent.model):
            self._refuse_first_pass(lent, parameters, config, sent, own)

        # Keep what stays here, but only after all steps: an exception leaves the client
        # in its state before the round.
        if sent.attempt is not None:
            clear_log(self.context)
        state = lent.arrays()
        warn_if_moved(sent.fixed_sha256, lambda: (lent.parts, before, state))
        if kept:
            of_hooks = kept_by(hooks, kept.of_hooks) if hooks else kept.of_hooks
            kept.keep(
                {name: state[name] for name in local}, of_hooks, sent.server_round
            )

        # Reply with the shared entries. If these are not all entries, name them.
        returned = returned_entries(state, local, hooks.values(), prefix)
        metrics = _metrics_of(result)
        if hooks:
            metrics[APPLIED] = ",".join(hooks)
        if kept:
            metrics |= kept.reply_metadata()
        if ARRAY_NAMES in config or len(returned) != len(state):
            metrics[ARRAY_NAMES] = json.dumps(list(returned))
        return returned, metrics

    def _refuse_first_pass(
        self,
        lent: LentModel,
        parameters: list[Array],
        config: Config,
        sent: TrainConfig,
        own: Mapping[str, Array],
    ) -> None:
        """Search the cause of a non-finite loss in a second model.

        Without a cause, the reply has the diverged entries, and the server refuses it.
        """
        with self._door.lend_again(lent, sent) as again:
            load_received(again, parameters, config, sent, own)
            size = self.settings.batch_size
            refuse_first_pass(again.plain, self.data.train, again.task, size)

    @contextmanager
    def _second_model(
        self, lent: LentModel, sent: MessageConfig
    ) -> Iterator[tuple[nn.Module, Task]]:
        with self._door.lend_again(lent, sent) as second:
            yield second.plain, second.task

    def _hooks(
        self,
        lent: LentModel,
        sent: TrainConfig,
        config: Config,
        local: Collection[str],
        trained: Callable[..., TrainResult],
    ) -> dict[str, ClientHook]:
        """Return the hooks that the message names, made for this client's training."""
        named_by_state(lent.plain)
        # A user's loop makes its optimizer itself.
        momentum = None if self.settings.loop else self.settings.sgd_momentum
        known = Known(
            optimizer=self.settings.optimizer,
            sgd_momentum=momentum,
            local_steps=self.settings.num_steps(len(self.data.train)) or None,
        )
        reducer = reducer_of(self.context, config)
        second = functools.partial(self._second_model, lent, sent)
        about = HookContext(
            *(config, frozenset(local), reducer),
            lambda model: self.data.validation_loss(model, lent.task_of(model)),
            *(trained, second, known),
        )
        return make_hooks(sent.hooks, about)

    def _training(
        self,
        lent: LentModel,
        sent: TrainConfig,
        settings: LocalTraining,
        config: Config,
    ) -> Callable[..., TrainResult]:
        """Return a function that trains a model on the client's data in this round."""
        by: Callable[..., TrainResult] = train
        if settings.loop:
            refuse = functools.partial(refuse_on_client, sent.hooks, config)
            by = functools.partial(train_by, settings.loop, refuse)

        return functools.partial(
            by,
            data=self.data.train,
            settings=settings,
            learning_rate=settings.learning_rate.at(sent.server_round, sent.frozen),
            stream=functools.partial(self.streams.generator, sent),
            second=functools.partial(self._second_model, lent, sent),
        )

    def _fine_tune(
        self,
        lent: LentModel,
        config: Config,
        kept: KeptState | None,
        local: frozenset[str],
    ) -> None:
        """Train the model before its test as in the round, but without other clients.

        Terms that depend on other clients are left out.
        """
        sent = TrainConfig.read(config)
        hooks = make_hooks(sent.hooks, HookContext(config, local))
        hand_over(hooks, {}, kept.of_hooks if kept else {})
        steps = replace(self.settings, local_steps=sent.fine_tune, local_epochs=0)
        # As without data, the model is tested as it is if it cannot train.
        with suppress(OneExampleError):
            trained = self._training(lent, sent, steps, config)
            trained(lent.model, task=lent.task, hooks=hooks)

    def evaluate(
        self, parameters: list[Array], config: Config
    ) -> tuple[float, int, Config]:
        """Evaluate the received entries and the local state on each test set.

        Returns:
            Mean loss on the first test set that is not empty, its size, and for each
            set the metrics ``<name>-loss``, ``<name>-num-examples`` and the metrics of
            the task, such as ``<name>-accuracy`` (without prefix for a single unnamed
            set). A set without counted targets has only its size. A metric is NaN if
            the test set does not define it.

        Raises:
            ConfigError: the client lacks a test set.
        """
        test_sets = self.data.asked_for(comma_list(config, TEST_SETS))
        metrics: Config = {}
        first: EvalResult | None = None
        with self.tested_model(parameters, config) as lent:
            for name, data in test_sets.items():
                prefix = f"{name}-" if name else ""
                count = f"{name}-{NUM_EXAMPLES}" if name else EXAMPLES_TESTED
                result = evaluate(lent.model, data, task=lent.task)
                lent.task.refuse_other_names(result.metrics)
                metrics[count] = result.num_examples
                # Skip data without targets, because their loss of NaN would make means
                # over the clients NaN.
                if not result.num_examples:
                    continue
                if not math.isfinite(result.loss):
                    refuse_not_finite(data, inputs_for(lent.plain))
                metrics |= result.named(prefix)
                if first is None:
                    first = result
        if first is None:
            return float("nan"), 0, metrics
        return first.loss, first.num_examples, metrics

    @contextmanager
    def tested_model(
        self, parameters: list[Array], config: Config
    ) -> Iterator[LentModel]:
        """Lend the model of a test, with received and local entries.

        It is fine-tuned, and its statistics are measured again, if the server asks.
        """
        sent = MessageConfig.read(config)
        with self._door.lend("test") as lent:
            kept = self._open_kept(lent, config, sent)
            local = entries_that_stay(lent, sent)
            own = kept.tested(local) if kept else {}
            load_received(lent, parameters, config, sent, own)
            if (sent.fine_tune or sent.recalibrate) and len(self.data.train):
                # A run saves only the state, so change it in a second model.
                with self._door.lend_again(lent, sent) as tuned:
                    if sent.fine_tune:
                        self._fine_tune(tuned, config, kept, frozenset(local))
                    if sent.recalibrate:
                        moments = self._moments(tuned, sent)
                        load_statistics(tuned.plain, moments, unbiased=True)
                    tested = tuned.plain.state_dict()
                    state = {name: entry.clone() for name, entry in tested.items()}
                load_state(lent.plain, state)
            yield lent

    def statistics(
        self, parameters: list[Array], config: Config
    ) -> tuple[list[Array], int, Config]:
        """Re-estimate BN statistics with the received weights.

        This is one pass over the training data; nothing is kept. If the server asks for
        class moments, the client's own model is used, with its own statistics.

        Returns:
            ``PATH.count``, ``PATH.mean`` and ``PATH.m2`` of each BN layer, the size of
            the training set, and their names in ``fedbn-flwr.array-names``. See
            ``batchnorm.reestimation``. With class moments: ``counts``, and
            ``PATH.first`` and ``PATH.second`` of each layer.
        """
        sent = MessageConfig.read(config)
        with self._door.lend("statistics") as lent:
            kept = self._open_kept(lent, config, sent)
            own = kept.load(entries_that_stay(lent, sent)) if kept else {}
            prefix = load_received(lent, parameters, config, sent, own).prefix
            if CLASS_MOMENTS in config:
                encoded = encode_moments_of_classes(self._class_moments(lent))
            else:
                moments = self._moments(lent, sent)
                encoded = encode_moments(moments, lent.plain.state_dict())
            entries = to_state(encoded)
        names = [name if name == COUNTS else prefix + name for name in entries]
        metrics: Config = {ARRAY_NAMES: json.dumps(names)}
        return list(entries.values()), len(self.data.train), metrics

    def _moments(self, lent: LentModel, sent: MessageConfig) -> dict[str, Moments]:
        """Return the moments of the training data, by BN layer."""
        return reestimate_statistics(
            lent.plain,
            self.data.train,
            batch_size=self.settings.batch_size,
            seed=self.streams.generator(sent, "statistics").initial_seed(),
            measured=sent.layers,
            second=functools.partial(self._second_model, lent, sent),
            task=lent.task,
        )

    def _class_moments(self, lent: LentModel) -> ClassMoments:
        """Return the class moments of the training data, with the model's statistics."""
        task = lent.task
        order = torch.split(torch.arange(len(self.data.train)), task.test_batch)
        with closing(with_positions(self.data.train, order)) as batches:
            return class_moments(lent.plain, (batch for _, batch in batches), task)

    def _open_kept(
        self,
        lent: LentModel,
        config: Config,
        sent: MessageConfig,
        hooks: NamedHooks = MappingProxyType({}),
    ) -> KeptState | None:
        """Return the client's local state, restored to the state the server expects.

        The result is None if nothing stays here: no entry, no state of the hooks, and
        no state of an earlier round.

        Raises:
            StateError: the app has ``bn_mod`` as well, or the state is lost.
        """
        if MOD in config:
            raise StateError(
                f"the app has the mod {config[MOD]}, but its client is a TorchClient:"
                " it keeps and sends its local state itself. Leave the mod out."
            )
        stored = self.context is not None and KEPT_STATES in self.context.state
        named = (sent.continuity, sent.local_sha256, sent.used_sha256)
        stays = sent.local_entries or any(overrides(h, "keep") for h in hooks.values())
        if not stored and not stays and named == (None, None, None):
            return None
        kept = KeptState(self.context, sent, self.partition_id, self.state_dir)
        kept.check(lent.fingerprint)
        return kept

    def get_parameters(self, config: Config) -> list[Array]:
        """Return the whole state dict, in its order."""
        with self._door.lend() as lent:
            return [*lent.arrays().values()]

    def get_properties(self, config: Config) -> Config:
        """Return the properties of the client for the strategies' query.

        They are ``num-examples`` of the training set, ``batch-size`` of the first step
        and the ``partition-id``.

        Raises:
            NormLayerError: the method synchronises BN layers, but this model's layers
                cannot be synchronised.
        """
        size = len(self.data.train)
        if config.get(SYNCHRONISES) and size:
            with self._door.lend() as lent:
                try_step(lent, self.data.train)
        properties: Config = {}
        if self.partition_id is not None:
            properties[PARTITION_ID] = self.partition_id
        name = site_name_of(self.context) if self.context else ""
        if name:
            properties[SITE_NAME] = name
        properties[NUM_EXAMPLES] = size
        properties[BATCH_SIZE] = self.settings.first_batch(size)
        return properties


def _metrics_of(result: TrainResult) -> Config:
    """Return the metrics of a training for the reply."""
    metrics: Config = {TRAIN_LOSS: result.loss}
    if result.accuracy is not None:
        metrics[TRAIN_ACCURACY] = result.accuracy
    metrics[EXAMPLES_PROCESSED] = result.num_processed
    metrics[STEPS] = result.num_steps
    metrics[DROPPED_BATCHES] = result.num_dropped
    return {**metrics, **result.metrics}
