"""Rules for the clients' data and batches; each is one function, from the measurements
to a finding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedbn_flwr.doctor import remedies, situations
from fedbn_flwr.doctor.differences import Shift
from fedbn_flwr.doctor.each_client import Compared
from fedbn_flwr.doctor.findings import Finding, Remedy, listed, number_of
from fedbn_flwr.doctor.measured import Measured
from fedbn_flwr.doctor.mismatch import Mismatch
from fedbn_flwr.doctor.thresholds import (
    LARGE_LOSS,
    MIN_GAP,
    MIN_LOSS,
    MIN_NOISE,
    SMALL_BATCH,
    Z_OF_A_GAP,
)
from fedbn_flwr.norms.report import shown_path

__all__ = [
    "client_below",
    "client_classes",
    "client_inputs",
    "clients_differ",
    "clients_named",
    "feature_shift",
    "label_skew",
    "small_batch",
    "train_test_mismatch",
    "unmoved_statistics",
]


def small_batch(m: Measured) -> Finding | None:
    """Batches of up to four examples: the statistics of a batch are mostly noise."""
    # 0 = not known
    sizes = [size for size in [*m.batch_sizes] or [m.training.batch_size] if size]
    small = [size for size in sizes if size <= SMALL_BATCH]
    if len(small) * 2 < max(1, len(sizes)) or (
        m.num_layers and len({*m.held, *m.corrected}) == m.num_layers
    ):
        return None
    # large images: many values per channel
    if m.noise and max(m.noise.values()) < MIN_NOISE and min(small) > 2:
        return None
    where = f" at {len(small)} of {len(sizes)} clients" if len(sizes) > 1 else ""
    evidence = [f"Batches have {number_of(min(small), 'example')}{where}."]
    numbers: dict[str, object] = {"batch-sizes": sizes}
    if m.noise:
        worst = max(m.noise, key=lambda path: m.noise[path])
        evidence.append(
            f"Within one client the mean of a batch varies by {m.noise[worst]:.2f}"
            f" standard deviations in {shown_path(worst)}: examples are shifted by as"
            " much, at random."
        )
        numbers |= {"noise": m.noise[worst], "layer": worst}
    # A larger batch is no remedy where clients have no more examples.
    chosen = situations.SMALL_BATCHES.remedies[m.training.batch_size > SMALL_BATCH :]
    return Finding(
        "small-batch",
        "The batches are too small for BatchNorm.",
        evidence,
        numbers,
        chosen,
    )


def client_inputs(m: Measured) -> Finding | None:
    """The inputs of a client look different to BatchNorm."""
    return _client(
        m,
        m.each.inputs,
        m.each.other_inputs,
        "client-inputs",
        "the inputs look different from those of the other clients.",
        "its inputs of BatchNorm are {:.2f} standard deviations from the usual ones;"
        " the median is {:.2f}.",
        remedies.CLIENT_INPUTS,
    )


def client_classes(m: Measured) -> Finding | None:
    """A client has other classes than the other clients have."""
    return _client(
        m,
        m.each.mix,
        m.each.other_mix,
        "client-classes",
        "the class mix differs from that of the other clients.",
        "its class mix is {:.2f} away from the usual one (total variation, 0 to 1); the"
        " median is {:.2f}.",
        situations.label_skew(m.training.local_steps).remedies,
    )


def client_below(m: Measured) -> Finding | None:
    """A client is far below the others, and neither its classes nor the inputs of
    BatchNorm say why.
    """
    return _client(
        m,
        m.each.below,
        m.each.worse,
        "client-below",
        "far below the others. Its inputs or labels differ; these measures cannot say"
        " which.",
        "its accuracy is {:.3f} below the median.",
        remedies.CLIENT_BELOW,
    )


def _client(
    m: Measured,
    measure: Compared | None,
    odd: Sequence[int],
    id_: str,
    what: str,
    evidence: str,
    chosen: Sequence[Remedy],
) -> Finding | None:
    """Return a finding about the odd clients; ``evidence`` is a sentence with places
    for the value and the median.
    """
    if measure is None or not odd:
        return None
    names = [m.names[k] for k in odd]
    median = sorted(measure.values)[(len(measure.values) - 1) // 2]
    lines = []
    for k in odd[:3]:
        line = f"Client {m.names[k]}: {evidence.format(measure.values[k], median)}"
        lines.append(
            f"{line} Its accuracy is {m.accuracy[k]:.3f}." if m.accuracy else line
        )
    numbers = {"clients": names, "values": [measure.values[k] for k in odd]}
    return Finding(id_, f"{clients_named(names)}: {what}", lines, numbers, chosen)


def clients_named(names: Sequence[str]) -> str:
    """Return "Client 3", "Clients 1, 3"."""
    return f"Client{'s' if len(names) > 1 else ''} {listed(names)}"


def label_skew(m: Measured) -> Finding | None:
    """Classes differ between clients beyond chance, and so do the inputs of BatchNorm."""
    skew, shift = m.skew, m.shift
    if skew is None or shift is None or not skew.counts or not shift.counts:
        return None
    evidence = [
        (
            f"The class mix of a client is {skew.mean:.2f} away from that of all"
            f" clients (total variation, 0 to 1); chance gives {skew.by_chance:.2f}"
            f" ({_p(skew.p_value)})."
        ),
        f"BatchNorm sees it: {_shifted(shift)}",
        *_furthest(m, skew.distances),
    ]
    steps = m.training.local_steps
    if steps:
        evidence.append(f"A round has E = {number_of(steps, 'local step')}.")
    numbers = {
        **_numbers(m, shift, skew.distances),
        "class-distance": skew.mean,
        "class-distance-by-chance": skew.by_chance,
        "local-steps": steps or None,
    }
    what = (
        "The clients hold different classes (label skew), and BatchNorm's statistics"
        " differ with them."
    )
    return Finding(
        "label-skew", what, evidence, numbers, situations.label_skew(steps).remedies
    )


def feature_shift(m: Measured) -> Finding | None:
    """Examples look different at different clients, whose classes are the same."""
    if m.shift is None or m.skew is None or m.skew.counts or not m.shift.counts:
        return None
    what = (
        "The same classes look different at different clients (feature shift: other"
        " devices, sites, domains)."
    )
    evidence = [
        f"In BatchNorm's inputs {_shifted(m.shift)}",
        (
            "The classes are not the cause: the class mix of a client is"
            f" {m.skew.mean:.2f} away from that of all clients, chance gives"
            f" {m.skew.by_chance:.2f}."
        ),
        *_furthest(m, m.shift.distances),
    ]
    numbers = _numbers(m, m.shift, m.shift.distances)
    return Finding(
        "feature-shift", what, evidence, numbers, situations.FEATURE_SHIFT.remedies
    )


def clients_differ(m: Measured) -> Finding | None:
    """The inputs of BatchNorm differ between clients, and the targets do not say why."""
    if m.shift is None or m.skew is not None or not m.shift.counts:
        return None
    what = (
        "BatchNorm's statistics differ between clients; feature shift and label skew"
        " cannot be told apart here."
    )
    evidence = [
        f"In BatchNorm's inputs {_shifted(m.shift)}",
        *_furthest(m, m.shift.distances),
    ]
    numbers = _numbers(m, m.shift, m.shift.distances)
    return Finding("clients-differ", what, evidence, numbers, remedies.CLIENTS_DIFFER)


def _shifted(shift: Shift) -> str:
    worst = shift.worst
    return (
        f"statistics of a client are {shift.layers[worst]:.2f} standard deviations from"
        f" those of all in {shown_path(worst)}; chance gives"
        f" {shift.by_chance[worst]:.2f} ({_p(shift.p_value)})."
    )


def _p(value: float) -> str:
    return f"p = {value:.3f}" if value >= 0.001 else "p < 0.001"


def _numbers(
    m: Measured, shift: Shift, distances: Sequence[float]
) -> dict[str, object]:
    worst = shift.worst
    values: dict[str, object] = {
        "shift": shift.layers[worst],
        "by-chance": shift.by_chance[worst],
        "layer": worst,
    }
    return {**values, "clients": _far(m, distances)}


def _far(m: Measured, distances: Sequence[float]) -> list[str]:
    """Return the clients that are at least as far as the mean, the furthest first."""
    mean = sum(distances) / max(1, len(distances))
    order = sorted(zip(distances, m.rest, strict=False), key=lambda pair: -pair[0])
    return [name for distance, name in order if distance >= mean]


def _furthest(m: Measured, distances: Sequence[float]) -> list[str]:
    far = _far(m, distances)
    lines = [f"The furthest clients: {listed(far)}."] if far else []
    if m.apart:
        lines.append(f"Without {listed(m.apart)}, which stand out by themselves.")
    return lines


def train_test_mismatch(m: Measured) -> Finding | None:
    """Running statistics do worse on the same examples than those of the test batch."""
    gap = m.gap
    if gap is None or not _harms(gap):
        return None
    running, batch = f"Loss {gap.running_loss:.4g}", f"{gap.batch_loss:.4g}"
    if gap.running_accuracy is not None:
        running = f"Accuracy {gap.running_accuracy:.3f} and loss {gap.running_loss:.4g}"
        batch = f"{gap.batch_accuracy:.3f} and {gap.batch_loss:.4g}"
    evidence = [
        f"{running} under running statistics, {batch} under those of mixed test"
        f" batches: the same {gap.examples} examples, the same weights (z ="
        f" {gap.z:.1f})."
    ]
    finite = {
        path: far
        for path, far in m.running.items()
        if math.isfinite(far.mean + far.variance)
    }
    if finite:
        worst = max(
            finite, key=lambda path: max(finite[path].mean, finite[path].variance)
        )
        evidence.append(
            f"In {shown_path(worst)} the running mean is {finite[worst].mean:.2f}"
            " standard deviations from that of all clients' examples under these"
            f" weights, and log of the variance {finite[worst].variance:.2f}."
        )
    return Finding(
        "train-test-mismatch",
        "The running statistics do not fit the model: training and test normalise"
        " differently.",
        evidence,
        {
            "running-accuracy": gap.running_accuracy,
            "batch-accuracy": gap.batch_accuracy,
            "z": gap.z,
        },
        remedies.MISMATCH_OF_UNMOVED if _never_moved(m) else remedies.MISMATCH,
    )


def _harms(gap: Mismatch) -> bool:
    """Return whether running statistics lose enough against those of the batch, and
    with certainty.
    """
    if gap.z < Z_OF_A_GAP:
        return False
    lost, share = gap.running_loss - gap.batch_loss, abs(gap.batch_loss)
    if gap.running_accuracy is None:
        return lost >= MIN_LOSS * share
    return gap.accuracy_lost >= MIN_GAP or lost >= max(
        LARGE_LOSS[0] * share, LARGE_LOSS[1]
    )


def _never_moved(m: Measured) -> list[str]:
    """Return the layers whose running statistics never moved: as at first; or with
    momentum 0 where that harms.
    """
    harm = m.gap is not None and _harms(m.gap)
    still = [path for path, momentum in m.momenta.items() if momentum == 0 and harm]
    return list(dict.fromkeys([*m.unmoved, *still]))


def unmoved_statistics(m: Measured) -> Finding | None:
    """Running statistics that no batch of the training has moved."""
    layers = _never_moved(m)
    if not layers:
        return None
    evidence = [
        f"{shown_path(path)}: mean 0 and variance 1, as at first, after"
        f" {number_of(count, 'batch', 'batches')}."
        for path, count in list(m.unmoved.items())[:3]
    ]
    still = [path for path in layers if m.momenta.get(path) == 0]
    if still:
        evidence.append(
            f"The momentum is 0 in {len(still)} of {m.num_layers} BatchNorm layers"
            f" ({listed(still)})."
        )
    return Finding(
        "unmoved-statistics",
        "The running statistics never moved, and tests normalise by them.",
        evidence,
        {"layers": layers, "momentum-0": still},
        remedies.UNMOVED_BY_MOMENTUM if still else remedies.UNMOVED,
    )
