"""``diagnose``: measure a model on the clients' data, and say what is wrong with its BatchNorm."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedbn_flwr.batchnorm.parts import Parts, split_state
from fedbn_flwr.doctor.by_batch import (
    BatchMoments,
    batch_moments,
    deviation,
    layers_of,
    noise,
    pooled,
    window_variance,
)
from fedbn_flwr.doctor.by_example import features
from fedbn_flwr.doctor.clients import ClientData, Loaders, read_clients
from fedbn_flwr.doctor.data_rules import remarks, unanswered
from fedbn_flwr.doctor.distances import Statistics
from fedbn_flwr.doctor.findings import Diagnosis
from fedbn_flwr.doctor.gradients import deviations, regrouped
from fedbn_flwr.doctor.heterogeneity import class_skew, shift
from fedbn_flwr.doctor.measured import Measured, Training
from fedbn_flwr.doctor.mismatch import Loss, accuracy_by_class, default_loss, mismatch, running_distances
from fedbn_flwr.doctor.rules import findings
from fedbn_flwr.doctor.state import (
    averaged_counters,
    missed_entries,
    tiny_gammas,
    unusable_statistics,
    variance_extremes,
)
from fedbn_flwr.doctor.thresholds import MAX_CLIENTS_B
from fedbn_flwr.errors import ConfigError, DataError, NormLayerError
from fedbn_flwr.training.freezing import holds_eval
from fedbn_flwr.training.wrappers import unwrap, wrapper_prefix

__all__ = ["diagnose", "diagnose_clients", "diagnose_state"]

_REGROUPED = 3  # regroupings of B_i: each is a forward and a backward pass of every client


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

    Nothing of the model, its mode or the default random generators changes.

    Args:
        model: the global model, any module, in the mode in which it is tested.
        client_loaders: a loader of training data for each client, in order or by name; it yields (inputs, targets).
        test_loaders: the same of test data; without them the mismatch of training and test is measured on training
            data, and a note says so.
        loss: returns the mean loss of a batch, from outputs and targets; by default cross-entropy for classes, mean
            squared error for numbers.
        training: E, the batch size, the method, as far as you know them: the remedies depend on it.
        state: a state dict as saved, which may hold what loading hides, float counters say; None = the model's.
        local_keys: names of the entries that stay with the client in your own FedBN.
        shared_keys: in place of ``local_keys``, the names of those that are sent.
        max_examples: examples of each client to use, the first of its loader.
        seed: of the regroupings.

    Raises:
        DataError: a loader yields no pairs of tensors, or no loss is known for the targets.
        ConfigError: there is no client with examples.
    """
    clients, tests = read_clients(client_loaders, max_examples), read_clients(test_loaders, max_examples)
    if not clients:
        raise ConfigError("client_loaders yield no examples. Give a loader for each client.")
    notes = [
        f"client {c.name}: the first {len(c):,} examples of its loader were used." for c in clients if not c.complete
    ]
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
        notes=notes,
    )


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
) -> Diagnosis:
    """Return what ``diagnose`` does, given the clients' data in memory; ``notes`` go before its own."""
    plain = unwrap(model)
    m = _of_state(plain, plain.state_dict() if state is None else state, training, local_keys, shared_keys)
    lacking: list[str] = []
    m.training_layers = [p for p, layer in layers_of(plain).items() if layer.training and not holds_eval(layer)]
    m.names, m.batch_sizes = [c.name for c in clients], [c.batch_size for c in clients]
    sizes = [_number(m.num_layers, "BatchNorm layer"), _number(len(clients), "client")]
    about = f"{', '.join(sizes)}, {sum(map(len, clients)):,} examples."
    if not m.num_layers:
        return Diagnosis(about, [], {}, ["everything: the model has no BatchNorm layer."])
    generator = torch.Generator().manual_seed(seed)
    measures = _measured(plain, clients, tests or clients, loss, m, lacking, generator)
    if not tests:
        notes = [*notes, "training and test were compared on training examples: pass test_loaders for others."]
    found, handled = findings(m)
    return Diagnosis(about, found, measures, [*lacking, *unanswered(m)], [*notes, *handled, *remarks(m)])


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
    """
    m = _of_state(model, state, training, local_keys, shared_keys)
    lacking = ["all that needs data: distances of the clients, B_i, mismatch of training and test, dead channels."]
    if model is None:
        lacking.append("BatchNorm layers without running statistics: names alone do not show them.")
    about = f"{_number(m.num_layers, 'BatchNorm layer')} in a state of {len(state)} entries."
    return Diagnosis(about, findings(m)[0], {}, lacking)


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _of_state(
    model: nn.Module | None,
    state: Mapping[str, Tensor],
    training: Training,
    local_keys: Collection[str] | None,
    shared_keys: Collection[str] | None,
) -> Measured:
    parts = split_state(state if model is None else model)
    layers = layers_of(model) if model is not None else {}
    m = Measured(training, num_layers=len(parts.layers))
    m.counters = averaged_counters(parts, state)
    m.unusable = unusable_statistics(parts, state)
    m.extremes = variance_extremes(parts, state, {path: layer.eps for path, layer in layers.items()})
    m.gammas = tiny_gammas(parts, state)
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


def _measured(
    model: nn.Module,
    clients: Sequence[ClientData],
    tests: Sequence[ClientData],
    loss: Loss,
    m: Measured,
    lacking: list[str],
    generator: torch.Generator,
) -> dict[str, Any]:
    """Fill ``m`` and ``lacking`` with what the data show; return the figures."""
    layers = layers_of(model)
    eps = {path: layer.eps for path, layer in layers.items()}
    moments = [batch_moments(model, client) for client in clients]
    rows = {path: _batches(layer, path, moments) for path, layer in layers.items()}
    m.noise = {path: row["batch-noise-mean"] for path, row in rows.items() if row.get("batch-noise-mean") is not None}
    running = running_distances(model, moments)
    m.running = {path: found.mean for path, found in running.items()}
    for path, found in running.items():
        rows[path]["running"] = found._asdict()
    seen = features(model, clients)
    if seen.left_out:
        lacking.append(f"differences of the clients in {', '.join(seen.left_out)}: no row an example.")
    m.constant = {path: (int(f.constant().sum()), len(f.low)) for path, f in seen.layers.items()}
    for path, (dead, channels) in m.constant.items():
        rows[path] |= {"constant-channels": dead, "channels": channels}
    figures: dict[str, Any] = {
        "clients": [*m.names],
        "examples": [len(client) for client in clients],
        "batch-sizes": [*m.batch_sizes],
        "layers": rows,
    }
    if len(clients) > 1 and seen.layers and not m.untracked:
        m.shift = shift(seen.layers, seen.owner, eps, generator)
        figures["shift"] = _shift_figures(m.shift, rows, "shift")
        if seen.classes is not None:
            m.skew = class_skew(seen.classes, seen.owner, generator)
            figures["class-skew"] = {"mean": m.skew.mean, **vars(m.skew)}
            m.within = shift(seen.layers, seen.owner, eps, generator, seen.classes)
            figures["shift-within-classes"] = _shift_figures(m.within, rows, "shift-within-classes")
    elif len(clients) < 2:
        lacking.append("differences between clients: there is one.")
    _try(lacking, "gradient deviation B_i", lambda: figures.update(_gradients(model, clients, loss, m, generator)))
    _try(lacking, "mismatch of training and test", lambda: figures.update(_gap(model, tests, loss, m, generator)))
    return figures


def _batches(layer: Any, path: str, moments: Sequence[BatchMoments]) -> dict[str, Any]:
    """Return the figures of a layer's batches, by client."""
    own = [list(client.get(path, ())) for client in moments]
    if not all(own):
        return {}
    everything = [m for batches in own for m in batches]
    if layer.running_mean is None:
        reference = pooled(everything)
    else:
        reference = Statistics(layer.running_mean.cpu(), layer.running_var.cpu())
    distances = [deviation(batches, reference, layer.eps) for batches in own]
    noises = [noise(batches, layer.eps) for batches in own]
    known = [value for value in noises if value is not None]
    return {
        "batch-deviation": {name: [getattr(d, name) for d in distances] for name in ("l1", "mean", "variance")},
        "window-variance": [window_variance(batches) for batches in own],
        "batch-noise": noises,
        "batch-noise-mean": sum(known) / len(known) if known else None,
    }


def _shift_figures(found: Any, rows: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    for path, value in found.layers.items():
        rows[path] |= {name: value, f"{name}-by-chance": found.by_chance[path]}
    return {"excess": found.excess, "p-value": found.p_value, "share": found.share}


def _gradients(
    model: nn.Module, clients: Sequence[ClientData], loss: Loss, m: Measured, generator: torch.Generator
) -> dict[str, Any]:
    chosen = [client for client in clients if len(client) > 1][:MAX_CLIENTS_B]
    if len(chosen) < 2:
        raise ConfigError("it needs two clients with two examples each")
    batches = [_batch(client, m.training.batch_size, generator) for client in chosen]
    m.deviations = deviations(model, batches, loss)
    chance = [deviations(model, regrouped(batches, generator), loss) for _ in range(_REGROUPED)]
    m.deviation_by_chance = sum(d.relative for row in chance for d in row) / sum(map(len, chance))
    return {
        "gradient-deviation": {
            "clients": [client.name for client in chosen],
            "absolute": [d.absolute for d in m.deviations],
            "relative": [d.relative for d in m.deviations],
            "relative-by-chance": m.deviation_by_chance,
        }
    }


def _batch(client: ClientData, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return a random batch of the client, of the given size (0 = the loader's), at least 2 examples."""
    count = min(len(client), max(2, size or client.batch_size))
    return client.batch(torch.randperm(len(client), generator=generator)[:count])


def _gap(
    model: nn.Module, tests: Sequence[ClientData], loss: Loss, m: Measured, generator: torch.Generator
) -> dict[str, Any]:
    m.gap = mismatch(model, tests, loss, generator)
    if m.training_layers or m.untracked or m.training.tested_by_batch:
        m.sorted_accuracy = accuracy_by_class(model, tests, 32)
    return {"train-test-mismatch": {**vars(m.gap), "accuracy-lost": m.gap.accuracy_lost}}


def _try(lacking: list[str], what: str, measure: Callable[[], None]) -> None:
    """Measure; what cannot be measured is noted."""
    try:
        measure()
    except (ConfigError, NormLayerError, DataError) as error:
        lacking.append(f"{what}: {error}")
