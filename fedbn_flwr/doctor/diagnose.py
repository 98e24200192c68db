"""``diagnose``: measure a model on the clients' data, and say what is wrong with its BatchNorm."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedbn_flwr.batchnorm.parts import Part, Parts, split_state
from fedbn_flwr.doctor.by_batch import held_layers, layers_of
from fedbn_flwr.doctor.clients import ClientData, Loaders, classes_of, read_clients
from fedbn_flwr.doctor.data_rules import remarks, unanswered
from fedbn_flwr.doctor.findings import Diagnosis, listed, number_of
from fedbn_flwr.doctor.measured import Measured, Training
from fedbn_flwr.doctor.measuring import Measuring
from fedbn_flwr.doctor.mismatch import LogitLoss, Loss, RowLoss, default_loss
from fedbn_flwr.doctor.rules import findings
from fedbn_flwr.doctor.state import (
    all_untrained,
    averaged_counters,
    missed_entries,
    named,
    tiny_gammas,
    unmoved,
    unusable_statistics,
    variance_extremes,
)
from fedbn_flwr.errors import ConfigError, StateError
from fedbn_flwr.norms.renorm import BatchRenorm
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.state_file import tensors_by_name
from fedbn_flwr.training.wrappers import unwrap, wrapper_prefix

__all__ = ["diagnose", "diagnose_clients", "diagnose_state"]

_SCRIPTED = "TorchScript's layers cannot be watched. Pass the plain module."


def diagnose(
    model: nn.Module,
    client_loaders: Loaders,
    *,
    test_loaders: Loaders = (),
    loss: Loss = default_loss,
    training: Training = Training(),  # noqa: B008  it is frozen
    state: Mapping[str, Tensor] | None = None,
    local_keys: Collection[str] | None = None,
    shared_keys: Collection[str] | None = None,
    max_examples: int = 1024,
    seed: int = 0,
) -> Diagnosis:
    """Return what is wrong with the BatchNorm of a federation, with evidence and remedies; ``print`` shows it.

    ::

        from fedbn_flwr import diagnose

        print(diagnose(model, client_loaders))

    Nothing of the model, its mode, the default random generators or those of the loaders changes. Forward hooks of your
    own run on copies of the model.

    Args:
        model: the global model, any module, in the mode in which it is tested.
        client_loaders: a loader of training data for each client, in order or by name; it yields (inputs, targets).
        test_loaders: the same of test data; without them the mismatch of training and test is measured on training
            data, and a note says so.
        loss: returns the mean loss of a batch, from outputs and targets; by default cross-entropy for classes, binary
            cross-entropy for one logit and targets 0 and 1, mean squared error for numbers.
        training: E, the batch size, the method, as far as you know them: the remedies depend on it.
        state: a state dict as saved, which may hold what loading hides, float counters say; None = the model's.
        local_keys: names of the entries that stay with the client in your own FedBN.
        shared_keys: in place of ``local_keys``, the names of those that are sent.
        max_examples: examples of each client to use. Of more they are drawn at random, if the loader is a
            ``DataLoader`` of a data set with indices; else they are the first of the loader, and a note says so.
        seed: of the groups of examples.

    Raises:
        DataError: a loader yields no pairs of tensors, or no loss is known for the targets.
        ConfigError: there is no client with examples, or ``max_examples`` is below 1.
        StateError: the state does not fit the model.
    """
    if max_examples < 1:
        raise ConfigError(f"max_examples={max_examples}: it must be at least 1.")
    empty, untested = list[str](), list[str]()
    clients = read_clients(client_loaders, max_examples, empty)
    tests = read_clients(test_loaders, max_examples, untested)
    notes = [*_notes_of_empty("loader", empty), *_notes_of_empty("test loader", untested)]
    if size := training.batch_size:
        clients = [replace(c, batch_size=size if c.left_out else min(size, len(c))) for c in clients]
    if not clients:
        raise ConfigError("client_loaders yield no examples. Give a loader for each client.")
    return diagnose_clients(
        model,
        clients,
        tests,
        loss=loss,
        training=training,
        state=state,
        local_keys=local_keys,
        shared_keys=shared_keys,
        seed=seed,
        notes=[*notes, *_notes_of_reading(clients, max_examples)],
    )


def _notes_of_empty(what: str, empty: Sequence[str]) -> list[str]:
    return [f"{_of_clients(empty)}: its {what} yields no examples; it is left out."] if empty else []


def _notes_of_reading(clients: Sequence[ClientData], max_examples: int) -> list[str]:
    """Return which clients' examples were not used as their loader yields them."""
    notes = []
    if repeating := [c.name for c in clients if c.repeats]:
        notes.append(
            f"{_of_clients(repeating)}: its sampler repeats examples; each was used once. The batches of its training "
            "may have another class mix."
        )
    if drawn := [c.name for c in clients if c.left_out == "drawn"]:
        notes.append(f"{_of_clients(drawn)}: {number_of(max_examples, 'example')} were drawn at random.")
    if first := [c for c in clients if c.left_out == "first"]:
        notes.append(
            f"{_of_clients([c.name for c in first])}: the first {len(first[0]):,} examples of its loader were used. If "
            "they come in an order, by class say, clients seem to differ that do not: shuffle them."
        )
    return notes


def diagnose_clients(
    model: nn.Module,
    clients: Sequence[ClientData],
    tests: Sequence[ClientData],
    *,
    loss: Loss = default_loss,
    training: Training = Training(),  # noqa: B008  it is frozen
    state: Mapping[str, Tensor] | None = None,
    local_keys: Collection[str] | None = None,
    shared_keys: Collection[str] | None = None,
    seed: int = 0,
    notes: Sequence[str] = (),
    own: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> Diagnosis:
    """Return what ``diagnose`` does, given the clients' data in memory; ``notes`` go before its own.

    ``own`` has the entries that clients keep, by client: each is scored with its own model.
    """
    plain = unwrap(model)
    m = _of_state(plain, _as_of(plain, state), training, local_keys, shared_keys)
    m.training_layers = [p for p, layer in layers_of(plain, every_path=True).items() if layer.training]
    m.not_finite = {c.name: (c.not_finite, len(c)) for c in [*clients, *tests] if c.not_finite}
    m.names, m.batch_sizes = [c.name for c in clients], [c.batch_size for c in clients]
    sizes = {"BatchNorm layer": m.num_layers, "client": len(clients), "example": sum(map(len, clients))}
    about = f"{', '.join(number_of(count, what) for what, count in sizes.items())}."
    if not m.num_layers:
        return Diagnosis(about, [], {}, ["everything: the model has no BatchNorm layer."])
    seen = layers_of(plain, every_path=True)
    scripted = [layer.path for layer in split_state(plain).layers if layer.path not in seen]
    lacking = [f"all that needs data, in {listed(scripted)}: {_SCRIPTED}"] if scripted else []
    if not seen:
        return Diagnosis(about, findings(m)[0], {"layers": _counts(m)}, lacking)
    loss = _chosen_loss(loss, [*clients, *tests])
    measuring = Measuring(plain, clients, tests or clients, loss, seed, m, own or {})
    with seeded(seed):  # a forward pass may draw
        measures = measuring.everything()
    for path, counts in _counts(m).items():
        measures["layers"].setdefault(path, {}).update(counts)
    notes = [*notes, *_notes_of_loss(loss)]
    if not tests:
        notes.append("training and test were compared on training examples: pass test_loaders for others.")
    of_rules, handled = findings(m)
    lacking += [*measuring.lacking, *unanswered(m)]
    return Diagnosis(about, of_rules, measures, lacking, [*notes, *handled, *remarks(m)])


def _chosen_loss(loss: Loss, clients: Sequence[ClientData]) -> Loss:
    """Return the loss for the targets of the clients, unless the user gave one."""
    if loss is default_loss and all(c.binary for c in clients):
        return LogitLoss()
    if loss is default_loss and all(c.rows for c in clients):
        return RowLoss(one_hot=classes_of(clients) is not None)
    return loss


def _notes_of_loss(loss: Loss) -> list[str]:
    """Return which loss was taken, where another one is possible."""
    notes = []
    if isinstance(loss, LogitLoss) and loss.used:
        notes.append(
            "the model has one output an example, and targets are 0 and 1: it was taken for a logit, with binary "
            "cross-entropy as loss. Pass loss= if it is another."
        )
    if isinstance(loss, RowLoss):
        kind = "cross-entropy" if loss.one_hot else "binary cross-entropy of each output"
        notes.append(f"targets are rows of 0 and 1: {kind} was taken as loss. Pass loss= if it is another.")
    return notes


def diagnose_state(
    state: Mapping[str, Tensor],
    *,
    model: nn.Module | None = None,
    local_keys: Collection[str] | None = None,
    shared_keys: Collection[str] | None = None,
    training: Training = Training(),  # noqa: B008  it is frozen
) -> Diagnosis:
    """Return what a state dict alone shows: counters, running variances, gammas, and a split by names.

    Args:
        state: the state dict.
        model: the model, for the types of its layers; without it layers are found by ``running_mean`` in the names.
        local_keys: names of the entries that stay with the client in your own FedBN.
        shared_keys: in place of ``local_keys``, the names of those that are sent.
        training: see ``diagnose``.

    Raises:
        StateError: the state does not fit the model.
    """
    model = None if model is None else unwrap(model)
    state = tensors_by_name(state) if model is None else _as_of(model, state)
    m = _of_state(model, state, training, local_keys, shared_keys)
    lacking = ["all that needs data: distances of the clients, mismatch of training and test."]
    if model is None:
        lacking.append("BatchNorm layers without running statistics: names alone do not show them.")
    about = f"{number_of(m.num_layers, 'BatchNorm layer')} in a state of {len(state)} entries."
    return Diagnosis(about, findings(m)[0], {"layers": _counts(m)}, lacking)


def _counts(m: Measured) -> dict[str, dict[str, int]]:
    """Return the figures of the state by layer: channels with an extreme variance or gamma; no other layer."""
    counts: dict[str, dict[str, int]] = {}
    for path, (low, high, _) in m.extremes.items():
        counts[path] = {"variances-below-eps": low, "variances-above-1e8": high}
    for path, (zero, _) in m.gammas.items():
        counts.setdefault(path, {})["gammas-of-0"] = zero
    return counts


def _as_of(model: nn.Module, state: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
    """Return the tensors of the state under the model's names, without a wrapper's prefix; None = the model's own.

    Raises:
        StateError: they do not fit the model, or the model's layers have no shapes yet.
    """
    entries = tensors_by_name(model.state_dict())
    if empty := [name for name, value in entries.items() if is_lazy(value)]:
        raise StateError(
            f"{len(empty)} entries of the model have no shape yet ({listed(empty)}): its layers are lazy. Run one "
            "batch through it first."
        )
    return entries if state is None else named(tensors_by_name(state), entries)


def _of_clients(names: Sequence[str]) -> str:
    return f"client {names[0]}" if len(names) == 1 else f"each of {len(names)} clients ({listed(names)})"


def _of_state(
    model: nn.Module | None,
    state: Mapping[str, Tensor],
    training: Training,
    local_keys: Collection[str] | None,
    shared_keys: Collection[str] | None,
) -> Measured:
    parts = split_state(state if model is None else model)
    layers = {} if model is None else layers_of(model, every_path=True)
    # Other buffers may hold infinity for a reason, a mask of attention say; names alone do not tell them apart.
    weights = state if model is None else {name for name, _ in model.named_parameters(remove_duplicate=False)}
    statistics = frozenset(parts.select([Part.STATISTICS, Part.COUNTERS]))
    m = Measured(training, num_layers=len(parts.layers))
    m.first_layer = parts.layers[0].path if parts.layers else ""
    m.counters = averaged_counters(parts, state)
    m.unusable = unusable_statistics(parts, state, [name for name in state if name in weights or name in statistics])
    m.diverged = any(name not in statistics for name in m.unusable)
    m.extremes = variance_extremes(parts, state, {path: layer.eps for path, layer in layers.items()})
    m.gammas = tiny_gammas(parts, state)
    m.fresh = all_untrained(parts, state)
    m.unmoved = unmoved(parts, state)
    m.held = [] if model is None else held_layers(model)
    m.momenta = {path: layer.momentum for path, layer in layers.items() if path not in m.held}
    m.corrected = [path for path, layer in layers.items() if isinstance(layer, BatchRenorm)]
    m.untracked = [path for path, layer in layers.items() if layer.running_mean is None]
    if local_keys is not None or shared_keys is not None:
        m.missed = missed_entries(parts, _local(parts, local_keys, shared_keys))
    return m


def _local(parts: Parts, local: Collection[str] | None, shared: Collection[str] | None) -> list[str]:
    """Return the names that stay with the client, without a wrapper's prefix.

    Raises:
        ConfigError: both are given, or a name is no entry of the model.
    """
    if local is not None and shared is not None:
        raise ConfigError("local_keys and shared_keys say the same in two ways: give one of them.")
    given = [*(local or ()), *(shared or ())]
    prefix = wrapper_prefix(given, parts.names)
    names = {name.removeprefix(prefix) for name in given}
    if unknown := sorted(names - {*parts.names}):
        raise ConfigError(
            f"{'local_keys' if shared is None else 'shared_keys'}: {len(unknown)} of {len(names)} names are no entries "
            f"of the model ({unknown[0]!r}, ...). Its first entries are {', '.join(parts.names[:3])}."
        )
    return [name for name in parts.names if (name in names) == (shared is None)]
