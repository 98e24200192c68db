"""``diagnose`` measures a model on the clients' data and reports faults."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import nn
from torch.nn.parameter import is_lazy

from fedbn_flwr.batchnorm.parts import Parts, split_state
from fedbn_flwr.batchnorm.train_only import moved_though_frozen, trained_words
from fedbn_flwr.doctor.by_batch import eval_layers
from fedbn_flwr.doctor.clients import ClientExamples, Loaders, read_clients
from fedbn_flwr.doctor.data_rules import clients_named
from fedbn_flwr.doctor.findings import Diagnosis, listed, number_of
from fedbn_flwr.doctor.measured import Measurements, Training
from fedbn_flwr.doctor.measuring import measure
from fedbn_flwr.doctor.mismatch import Loss, default_loss
from fedbn_flwr.doctor.rules import findings
from fedbn_flwr.doctor.state import (
    TensorState,
    averaged_counters,
    missed_entries,
    named,
    unmoved,
    unusable_statistics,
    variance_extremes,
)
from fedbn_flwr.errors import ConfigError, StateError
from fedbn_flwr.training.freezing import layers_of, moving_though_frozen
from fedbn_flwr.training.model_state import unwrap, wrapper_prefix
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.state_file import tensors_by_name


def diagnose(
    model: nn.Module,
    client_loaders: Loaders,
    *,
    test_loaders: Loaders = (),
    loss: Loss = default_loss,
    training: Training = Training(),  # noqa: B008  it is frozen
    state: TensorState | None = None,
    local_keys: Collection[str] | None = None,
    max_examples: int = 1024,
    seed: int = 0,
) -> Diagnosis:
    """Return a diagnosis of the BatchNorm in a federation.

    ``print`` shows the diagnosis as text.

    Example::

        >>> import torch
        >>> from torch import nn
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from fedbn_flwr import diagnose
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        >>> client_loaders = []
        >>> for site in range(3):
        ...     inputs = torch.randn(200, 4) + 3 * site
        ...     data = TensorDataset(inputs, torch.arange(200) % 2)
        ...     client_loaders.append(DataLoader(data, batch_size=32))
        >>> diagnosis = diagnose(model.eval(), client_loaders)
        >>> "feature-shift" in [finding.id for finding in diagnosis.findings]
        True

    The model, its mode and the default random generators do not change. A loader with
    its own generator shuffles as in any pass. Your own forward hooks run on copies of
    the model.

    Args:
        model: the global model, any module, in the mode of its tests.
        client_loaders: a loader of training data for each client, in order or by name.
        test_loaders: a loader of test data for each client. Without them, the mismatch
            of training and test is measured on training data, and a note says so.
        loss: returns the mean loss of a batch, from outputs and targets. The default is
            cross-entropy for classes.
        training: the number of local steps E, the batch size and the method, if you
            know them, because the remedies depend on them.
        state: a saved state dict to check. Pass it if you have one, because loading may
            hide faults such as float counters. None means the model's own state.
        local_keys: names of the entries that stay with the client in your own FedBN.
        max_examples: the most examples to use of each client. If a client has more, a
            random sample is drawn, provided that the loader is a ``DataLoader`` of a
            data set with indices. Otherwise the first examples are used, with a note.
        seed: seed of the random deals and batches.

    Raises:
        DataError: a loader does not yield pairs of tensors.
        ConfigError: no client has examples, or a name in ``local_keys`` is not an entry
            of the model.
        StateError: the state does not fit the model, or a layer has no shape yet.
    """
    clients = read_clients(client_loaders, max_examples)
    tests = read_clients(test_loaders, max_examples)
    if not clients:
        raise ConfigError(
            "client_loaders yield no examples. Pass a loader for each client."
        )
    notes = []
    given = len(client_loaders) + len(test_loaders)
    left_out = given - len(clients) - len(tests)
    if left_out:
        notes.append(f"left out: {number_of(left_out, 'loader')} without examples.")
    ordered = [client.name for client in clients if client.first_only]
    if ordered:
        notes.append(
            f"{clients_named(ordered)}: only the first examples of the loader were"
            " used."
            " If they are sorted, for example by class, clients seem to differ although"
            " they do not. Shuffle them."
        )
    # Use the batch size of training, not the batch size of the loaders passed here.
    if training.batch_size:
        for k, client in enumerate(clients):
            size = training.batch_size
            # The client has no further examples, so its batches cannot be larger.
            if len(client) < max_examples:
                size = min(size, len(client))
            clients[k] = replace(client, batch_size=size)
    return diagnose_clients(
        model,
        clients,
        tests,
        loss=loss,
        training=training,
        state=state,
        local_keys=local_keys,
        seed=seed,
        notes=notes,
    )


def diagnose_clients(
    model: nn.Module,
    clients: Sequence[ClientExamples],
    tests: Sequence[ClientExamples],
    *,
    loss: Loss = default_loss,
    training: Training = Training(),  # noqa: B008  it is frozen
    state: TensorState | None = None,
    local_keys: Collection[str] | None = None,
    seed: int = 0,
    notes: Sequence[str] = (),
) -> Diagnosis:
    """Return the diagnosis of ``diagnose`` for clients' data in memory.

    ``notes`` precede the function's own notes.
    """
    # First measure the state and the model, without data.
    plain = unwrap(model)
    m = _of_state(plain, _as_of(plain, state), training, local_keys)
    layers = layers_of(plain, every_path=True)
    m.training_layers = [path for path, layer in layers.items() if layer.training]
    m.clients = clients
    about = (
        f"{number_of(m.num_layers, 'BatchNorm layer')},"
        f" {number_of(len(clients), 'client')},"
        f" {number_of(sum(map(len, clients)), 'example')}."
    )
    # Stop here if a forward pass would be useless.
    not_finite = [
        client.name
        for client in [*clients, *tests]
        if not bool(client.inputs.isfinite().all())
    ]
    if not_finite:
        lacking = [
            "checks that need data, because inputs contain NaN or infinity"
            f" ({clients_named(not_finite)})."
        ]
        return Diagnosis(about, findings(m)[0], {}, lacking)

    # A forward pass may draw random numbers, for example in dropout in train mode.
    with seeded(seed):
        lacking = measure(plain, clients, tests or clients, loss, seed, m)
    found, handled = findings(m)
    if not m.num_layers:
        # The remedies are for BatchNorm.
        found = [replace(finding, remedies=[]) for finding in found]
    notes = [*notes, *_notes(m, tests), *handled]
    return Diagnosis(about, found, m.figures(), lacking, notes)


def _notes(m: Measurements, tests: Sequence[ClientExamples]) -> list[str]:
    """Return notes that a reader needs to interpret the findings."""
    notes = []
    if not tests and m.num_layers:
        notes.append(
            "training and test were compared on training examples. Pass test_loaders to"
            " compare them on other examples."
        )
    if m.in_eval:
        notes.append(
            f"{len(m.in_eval)} of {m.num_layers} BatchNorm layers stay in eval mode"
            f" ({listed(m.in_eval)}). They normalise by fixed statistics in training,"
            " so"
            " the findings about batches and clients leave them out."
        )
    return notes


def diagnose_state(
    state: TensorState,
    *,
    model: nn.Module | None = None,
    local_keys: Collection[str] | None = None,
    training: Training = Training(),  # noqa: B008  it is frozen
) -> Diagnosis:
    """Return a diagnosis of a state dict, without data.

    The function checks counters, running statistics and a split by names.

    Args:
        state: the state dict.
        model: the model, for the types of its layers. Without it, layers are recognised
            by ``running_mean`` in the names.
        local_keys: names of the entries that stay with the client in your own FedBN.
        training: see ``diagnose``.

    Raises:
        ConfigError: a name in ``local_keys`` is not an entry of the model.
        StateError: the state does not fit the model, or a layer has no shape yet.
    """
    model = None if model is None else unwrap(model)
    state = tensors_by_name(state) if model is None else _as_of(model, state)
    m = _of_state(model, state, training, local_keys)
    lacking = [
        "checks that need data: distances between clients, mismatch of training and"
        " test."
    ]
    if model is None:
        lacking.append(
            "BatchNorm layers without running statistics, because names do not reveal"
            " them."
        )
    about = (
        f"{number_of(m.num_layers, 'BatchNorm layer')} in a state of {len(state)}"
        " entries."
    )
    return Diagnosis(about, findings(m)[0], {}, lacking)


def _as_of(model: nn.Module, state: TensorState | None) -> TensorState:
    """Return the tensors of a state, or of the model itself, under the model's names.

    Raises:
        StateError: the state does not fit the model, or the model's layers have no
            shapes yet.
    """
    entries = tensors_by_name(model.state_dict())
    empty = [name for name, value in entries.items() if is_lazy(value)]
    if empty:
        raise StateError(
            f"{len(empty)} entries of the model have no shape yet ({listed(empty)}),"
            " because its layers are lazy. Run one batch through the model first."
        )
    if state is None:
        return entries
    return named(tensors_by_name(state), entries)


def _of_state(
    model: nn.Module | None,
    state: TensorState,
    training: Training,
    local_keys: Collection[str] | None,
) -> Measurements:
    """Return the measurements of a state and of a model's layers."""
    parts = split_state(state if model is None else model)
    of_batchnorm = {*parts.statistics, *parts.counters}
    layers, checked = {}, [*state]
    if model is not None:
        layers = layers_of(model, every_path=True)
        # Check only parameters and BatchNorm's entries. Other buffers may contain
        # infinity for a reason, such as an attention mask, and their names do not
        # distinguish them from parameters.
        weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        checked = [name for name in state if name in weights | of_batchnorm]

    m = Measurements(training, num_layers=len(parts.layers))
    if parts.layers:
        m.first_layer = parts.layers[0].path
    m.counters = averaged_counters(parts, state)
    m.unusable = unusable_statistics(parts, state, checked)
    m.diverged = not of_batchnorm.issuperset(m.unusable)
    eps = {path: layer.eps for path, layer in layers.items()}
    m.extremes = variance_extremes(parts, state, eps)
    m.unmoved = unmoved(parts, state)
    if local_keys is not None:
        m.missed = missed_entries(parts, _without_prefix(parts, local_keys))
    if model is not None:
        m.in_eval = eval_layers(model)
        trains = {name: one.requires_grad for name, one in model.named_parameters()}
        m.moving, m.trained = moving_though_frozen(model), trained_words(trains)
    if training.initial:
        states = []
        for one in (training.initial, state):
            states.append({name: entry.cpu() for name, entry in one.items()})
        m.moving, m.trained = moved_though_frozen(parts, *states)

    # Read the attributes of the layers themselves.
    momenta, untracked = {}, []
    for path, layer in layers.items():
        if path not in m.in_eval:
            momenta[path] = layer.momentum
        if layer.running_mean is None:
            untracked.append(path)
    m.momenta, m.untracked = momenta, untracked
    return m


def _without_prefix(parts: Parts, given: Collection[str]) -> set[str]:
    """Return the given names of entries without a wrapper's prefix.

    Raises:
        ConfigError: a name is not an entry of the model.
    """
    prefix = wrapper_prefix(given, parts.names)
    names = {name.removeprefix(prefix) for name in given}
    unknown = sorted(names - {*parts.names})
    if unknown:
        raise ConfigError(
            f"local_keys: {len(unknown)} of {len(names)} names are not entries of the"
            f" model ({unknown[0]!r}, ...). The first entries of the model are"
            f" {', '.join(parts.names[:3])}."
        )
    return names
