"""``diagnose``: measure a model on the clients' data, and say what is wrong."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import nn
from torch.nn.parameter import is_lazy

from fedbn_flwr.batchnorm.parts import Parts, split_state
from fedbn_flwr.doctor.by_batch import eval_layers
from fedbn_flwr.doctor.clients import ClientData, Loaders, read_clients
from fedbn_flwr.doctor.data_rules import clients_named
from fedbn_flwr.doctor.findings import Diagnosis, listed, number_of
from fedbn_flwr.doctor.measured import Measured, Training
from fedbn_flwr.doctor.measuring import Measuring
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
from fedbn_flwr.norms.renorm import BatchRenorm
from fedbn_flwr.training.freezing import layers_of
from fedbn_flwr.training.model_state import unwrap, wrapper_prefix
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.state_file import tensors_by_name

__all__ = ["diagnose", "diagnose_clients", "diagnose_state"]

_SCRIPTED = "TorchScript's layers cannot be watched. Pass the plain module."


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
    """Return what is wrong with the BatchNorm of a federation; ``print`` shows it.

    ::

        from fedbn_flwr import diagnose

        print(diagnose(model, client_loaders))

    Nothing of the model, its mode, the default random generators or those of the
    loaders changes. Forward hooks of your own run on copies of the model.

    Args:
        model: the global model, any module, in the mode in which it is tested.
        client_loaders: a loader of training data for each client, in order or by name;
            it yields (inputs, targets).
        test_loaders: the same of test data; without them the mismatch of training and
            test is measured on training data, and a note says so.
        loss: returns the mean loss of a batch, from outputs and targets; by default
            cross-entropy for classes.
        training: E, the batch size, the method, as far as you know them: the remedies
            depend on it.
        state: a state dict as saved, which may hold what loading hides, float counters
            say; None = the model's.
        local_keys: names of the entries that stay with the client in your own FedBN.
        max_examples: examples of each client to use. Of more they are drawn at random,
            if the loader is a ``DataLoader`` of a data set with numbered examples; else
            they are the first of the loader, and a note says so.
        seed: of the groups of examples.

    Raises:
        DataError: a loader yields no pairs of tensors.
        ConfigError: there is no client with examples, or ``max_examples`` is below 1.
        StateError: the state does not fit the model.
    """
    if max_examples < 1:
        raise ConfigError(f"max_examples={max_examples}: it must be at least 1.")
    clients = read_clients(client_loaders, max_examples)
    tests = read_clients(test_loaders, max_examples)
    if not clients:
        raise ConfigError(
            "client_loaders yield no examples. Give a loader for each client."
        )
    notes = []
    given = len(client_loaders) + len(test_loaders)
    left_out = given - len(clients) - len(tests)
    if left_out:
        notes.append(f"{number_of(left_out, 'loader')} without examples: left out.")
    ordered = [client.name for client in clients if client.first_only]
    if ordered:
        notes.append(
            f"{clients_named(ordered)}: the first examples of the loader were used. If"
            " they come in an order, by class say, clients seem to differ that do not:"
            " shuffle them."
        )
    # The batch size of training counts, not that of the loaders for this look.
    if training.batch_size:
        for k, client in enumerate(clients):
            size = training.batch_size
            # All of its examples were read, and it has no larger batch than these.
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
    clients: Sequence[ClientData],
    tests: Sequence[ClientData],
    *,
    loss: Loss = default_loss,
    training: Training = Training(),  # noqa: B008  it is frozen
    state: TensorState | None = None,
    local_keys: Collection[str] | None = None,
    seed: int = 0,
    notes: Sequence[str] = (),
    own: Mapping[str, TensorState] | None = None,
) -> Diagnosis:
    """Return what ``diagnose`` does, given the clients' data in memory.

    ``notes`` go before its own. ``own`` has the entries that clients keep, by client:
    each is scored with its own model.
    """
    # What the state and the model show without data.
    plain = unwrap(model)
    m = _of_state(plain, _as_of(plain, state), training, local_keys)
    layers = layers_of(plain, every_path=True)
    m.training_layers = [path for path, layer in layers.items() if layer.training]
    m.names = [client.name for client in clients]
    m.examples = [len(client) for client in clients]
    m.batch_sizes = [client.batch_size for client in clients]
    about = (
        f"{number_of(m.num_layers, 'BatchNorm layer')},"
        f" {number_of(len(clients), 'client')},"
        f" {number_of(sum(map(len, clients)), 'example')}."
    )
    if not m.num_layers:
        nothing = ["everything: the model has no BatchNorm layer."]
        return Diagnosis(about, [], {}, nothing)

    # What makes a forward pass useless.
    lacking = []
    scripted = [
        layer.path for layer in split_state(plain).layers if layer.path not in layers
    ]
    if scripted:
        lacking.append(f"all that needs data, in {listed(scripted)}: {_SCRIPTED}")
    not_finite = [
        client.name
        for client in [*clients, *tests]
        if not bool(client.inputs.isfinite().all())
    ]
    if not_finite:
        lacking.append(
            "all that needs data: inputs hold NaN or infinity"
            f" ({clients_named(not_finite)})."
        )
    if not_finite or not layers:
        return Diagnosis(about, findings(m)[0], {}, lacking)

    measuring = Measuring(plain, clients, tests or clients, loss, seed, m, own or {})
    # A forward pass may draw, of dropout that stays in train mode say.
    with seeded(seed):
        measuring.everything()
    lacking += measuring.lacking
    if m.skew is not None and m.skew.counts:
        lacking.append(
            "feature shift apart from label skew: the clients hold different classes."
        )
    found, handled = findings(m)
    notes = [*notes, *_notes(m, tests), *handled]
    return Diagnosis(about, found, measuring.figures, lacking, notes)


def _notes(m: Measured, tests: Sequence[ClientData]) -> list[str]:
    """Return what a reader of the findings must know of the measurements."""
    notes = []
    if not tests:
        notes.append(
            "training and test were compared on training examples: pass test_loaders"
            " for others."
        )
    if m.in_eval:
        notes.append(
            f"{len(m.in_eval)} of {m.num_layers} BatchNorm layers are held in eval mode"
            f" ({listed(m.in_eval)}): in training they normalise by fixed statistics, so"
            " what is said of batches and of clients leaves them out."
        )
    skewed = m.skew is not None and m.skew.counts
    if skewed and m.shift is not None and not m.shift.counts:
        notes.append(
            "the clients hold different classes, but BatchNorm's statistics hardly"
            " differ with them. It is not BatchNorm that this skew harms."
        )
    return notes


def diagnose_state(
    state: TensorState,
    *,
    model: nn.Module | None = None,
    local_keys: Collection[str] | None = None,
    training: Training = Training(),  # noqa: B008  it is frozen
) -> Diagnosis:
    """Return what a state dict alone shows: counters, statistics, a split by names.

    Args:
        state: the state dict.
        model: the model, for the types of its layers; without it layers are found by
            ``running_mean`` in the names.
        local_keys: names of the entries that stay with the client in your own FedBN.
        training: see ``diagnose``.

    Raises:
        StateError: the state does not fit the model.
    """
    model = None if model is None else unwrap(model)
    state = tensors_by_name(state) if model is None else _as_of(model, state)
    m = _of_state(model, state, training, local_keys)
    lacking = [
        "all that needs data: distances of the clients, mismatch of training and test."
    ]
    if model is None:
        lacking.append(
            "BatchNorm layers without running statistics: names alone do not show them."
        )
    about = (
        f"{number_of(m.num_layers, 'BatchNorm layer')} in a state of {len(state)}"
        " entries."
    )
    return Diagnosis(about, findings(m)[0], {}, lacking)


def _as_of(model: nn.Module, state: TensorState | None) -> TensorState:
    """Return the tensors of the state under the model's names; None = the model's own.

    Raises:
        StateError: they do not fit the model, or the model's layers have no shapes yet.
    """
    entries = tensors_by_name(model.state_dict())
    empty = [name for name, value in entries.items() if is_lazy(value)]
    if empty:
        raise StateError(
            f"{len(empty)} entries of the model have no shape yet ({listed(empty)}):"
            " its layers are lazy. Run one batch through it first."
        )
    if state is None:
        return entries
    return named(tensors_by_name(state), entries)


def _of_state(
    model: nn.Module | None,
    state: TensorState,
    training: Training,
    local_keys: Collection[str] | None,
) -> Measured:
    """Return the measurements of the state, and of a model's layers."""
    parts = split_state(state if model is None else model)
    of_batchnorm = {*parts.statistics, *parts.counters}
    layers, checked = {}, [*state]
    if model is not None:
        layers = layers_of(model, every_path=True)
        # Other buffers may hold infinity for a reason, a mask of attention say; names
        # alone do not tell them apart.
        weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        checked = [name for name in state if name in weights | of_batchnorm]

    m = Measured(training, num_layers=len(parts.layers))
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

    # What the layers say of themselves.
    momenta, corrected, untracked = {}, [], []
    for path, layer in layers.items():
        if path not in m.in_eval:
            momenta[path] = layer.momentum
        if isinstance(layer, BatchRenorm):
            corrected.append(path)
        if layer.running_mean is None:
            untracked.append(path)
    m.momenta, m.corrected, m.untracked = momenta, corrected, untracked
    return m


def _without_prefix(parts: Parts, given: Collection[str]) -> set[str]:
    """Return names of entries without a wrapper's prefix.

    Raises:
        ConfigError: a name is no entry of the model.
    """
    prefix = wrapper_prefix(given, parts.names)
    names = {name.removeprefix(prefix) for name in given}
    unknown = sorted(names - {*parts.names})
    if unknown:
        raise ConfigError(
            f"local_keys: {len(unknown)} of {len(names)} names are no entries of the"
            f" model ({unknown[0]!r}, ...). Its first entries are"
            f" {', '.join(parts.names[:3])}."
        )
    return names
