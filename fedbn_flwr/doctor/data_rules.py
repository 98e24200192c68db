"""Rules for the clients' data and batches; each is one function, from the measurements to a finding."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedbn_flwr.doctor import remedies, situations
from fedbn_flwr.doctor.differences import Shift
from fedbn_flwr.doctor.findings import Finding, listed, number_of
from fedbn_flwr.doctor.measured import Measured
from fedbn_flwr.doctor.mismatch import Mismatch
from fedbn_flwr.doctor.thresholds import (
    CERTAIN,
    LARGE_LOSS,
    MIN_GAP,
    MIN_LOSS,
    MIN_NOISE,
    MIN_PEAK,
    MIN_SHIFT,
    SMALL_BATCH,
    Z_OF_A_GAP,
)
from fedbn_flwr.norms.report import shown_path

__all__ = [
    "clients_differ",
    "feature_shift",
    "harms",
    "inputs_not_finite",
    "label_skew",
    "remarks",
    "small_batch",
    "train_test_mismatch",
    "unanswered",
    "unmoved_statistics",
]


def inputs_not_finite(m: Measured) -> Finding | None:
    """Examples with NaN or infinity: nothing that they are part of can be measured."""
    if not m.not_finite:
        return None
    evidence = [
        f"Client {name}: {bad} of {number_of(count, 'example')}." for name, (bad, count) in m.not_finite.items()
    ]
    what = f"Inputs of {number_of(len(m.not_finite), 'client')} hold NaN or infinity."
    return Finding("inputs-not-finite", what, evidence[:3], {"clients": [*m.not_finite]}, remedies.NOT_FINITE)


def small_batch(m: Measured) -> Finding | None:
    """Batches of up to four examples: the statistics of a batch are mostly noise."""
    sizes = [size for size in [*m.batch_sizes] or [m.training.batch_size] if size]  # 0 = not known
    small = [size for size in sizes if size <= SMALL_BATCH]
    if len(small) * 2 < max(1, len(sizes)) or (m.num_layers and len({*m.held, *m.corrected}) == m.num_layers):
        return None
    if m.noise and max(m.noise.values()) < MIN_NOISE and min(small) > 2:  # large images: many values per channel
        return None
    where = f" at {len(small)} of {len(sizes)} clients" if len(sizes) > 1 else ""
    evidence = [f"Batches have {number_of(min(small), 'example')}{where}."]
    numbers: dict[str, object] = {"batch-sizes": sizes}
    if m.noise:
        worst = max(m.noise, key=lambda path: m.noise[path])
        evidence.append(
            f"Within one client the mean of a batch varies by {m.noise[worst]:.2f} standard deviations in "
            f"{shown_path(worst)} ({sum(m.noise.values()) / len(m.noise):.2f} over all layers): examples are shifted "
            "by as much, at random."
        )
        numbers |= {"noise": m.noise[worst], "layer": worst}
    # A larger batch is no remedy where clients have no more examples.
    chosen = situations.SMALL_BATCHES.remedies[m.training.batch_size > SMALL_BATCH :]
    return Finding("small-batch", "The batches are too small for BatchNorm.", evidence, numbers, chosen)


def label_skew(m: Measured) -> Finding | None:
    """Classes differ between clients beyond chance, and so do the inputs of BatchNorm."""
    skew, shift = m.skew, m.shift
    if skew is None or shift is None or not skew.counts or not _affects(shift):
        return None
    evidence = [
        f"The class mix of a client is {skew.mean:.2f} away from that of all clients (total variation, 0 to 1); chance "
        f"gives {skew.by_chance:.2f} ({_p(skew.p_value)}).",
        f"BatchNorm sees it: {_shifted(shift)}",
        *_furthest(m, skew.distances),
    ]
    steps = m.training.local_steps
    if steps:
        evidence.append(f"A round has E = {steps} local step{'s' if steps > 1 else ''}.")
    numbers = {
        "class-distance": skew.mean,
        "class-distance-by-chance": skew.by_chance,
        "shift": shift.layers[shift.worst],
        "layer": shift.worst,
        "local-steps": steps or None,
        "clients": _far(m, skew.distances),
    }
    what = "The clients hold different classes (label skew), and BatchNorm's statistics differ with them."
    return Finding("label-skew", what, evidence, numbers, situations.label_skew(steps).remedies)


def feature_shift(m: Measured) -> Finding | None:
    """Examples look different at different clients, whose classes are the same."""
    if m.shift is None or m.skew is None or m.skew.counts or not _affects(m.shift):
        return None
    what = "The same classes look different at different clients (feature shift: other devices, sites, domains)."
    evidence = [
        f"In BatchNorm's inputs {_shifted(m.shift)}",
        f"The classes are not the cause: the class mix of a client is {m.skew.mean:.2f} away from that of all "
        f"clients, chance gives {m.skew.by_chance:.2f}.",
        *_furthest(m, m.shift.distances),
    ]
    return Finding("feature-shift", what, evidence, _numbers(m, m.shift), situations.FEATURE_SHIFT.remedies)


def clients_differ(m: Measured) -> Finding | None:
    """The inputs of BatchNorm differ between clients, and the targets do not say why."""
    if m.shift is None or m.skew is not None or not _affects(m.shift):
        return None
    what = "BatchNorm's statistics differ between clients; feature shift and label skew cannot be told apart here."
    evidence = [f"In BatchNorm's inputs {_shifted(m.shift)}", *_furthest(m, m.shift.distances)]
    return Finding("clients-differ", what, evidence, _numbers(m, m.shift), remedies.CLIENTS_DIFFER)


def _shifted(shift: Shift) -> str:
    worst, p_value = shift.worst, min(shift.p_value, shift.peak_p_value)
    return (
        f"statistics of a client are {shift.layers[worst]:.2f} standard deviations from those of all in "
        f"{shown_path(worst)}; chance gives {shift.by_chance[worst]:.2f} ({_p(p_value)})."
    )


def _p(value: float) -> str:
    return f"p = {value:.3f}" if value >= 0.001 else "p < 0.001"


def _numbers(m: Measured, shift: Shift) -> dict[str, object]:
    worst = shift.worst
    clients = _far(m, shift.distances)
    return {"shift": shift.layers[worst], "by-chance": shift.by_chance[worst], "layer": worst, "clients": clients}


def train_test_mismatch(m: Measured) -> Finding | None:
    """Running statistics do worse on the same examples than those of the test batch."""
    gap = m.gap
    if gap is None or not harms(gap):
        return None
    if gap.running_accuracy is None:
        running, batch = f"Loss {gap.running_loss:.4g}", f"{gap.batch_loss:.4g}"
    else:
        running = f"Accuracy {gap.running_accuracy:.3f} and loss {gap.running_loss:.4g}"
        batch = f"{gap.batch_accuracy:.3f} and {gap.batch_loss:.4g}"
    evidence = [
        f"{running} under running statistics, {batch} under those of mixed test batches: the same {gap.examples} "
        f"examples, the same weights (z = {max(gap.z, gap.accuracy_z):.1f})."
    ]
    finite = {path: far for path, far in m.running.items() if math.isfinite(far.mean + far.variance)}
    if finite:
        worst = max(finite, key=lambda path: max(finite[path].mean, finite[path].variance))
        _, mean, variance = finite[worst]
        off = f"mean is {mean:.2f} standard deviations"
        if variance > mean:
            off = f"variance is a factor of {math.exp(min(variance, 700)):.3g}"
        evidence.append(
            f"In {shown_path(worst)} the running {off} from that of all clients' examples under these weights."
        )
    return Finding(
        "train-test-mismatch",
        "The running statistics do not fit the model: training and test normalise differently.",
        evidence,
        {
            **{"running-accuracy": gap.running_accuracy, "batch-accuracy": gap.batch_accuracy},
            **{"z": gap.z, "accuracy-z": gap.accuracy_z},
        },
        remedies.mismatch(bool(never_moved(m)), m.momenta.values()),
    )


def harms(gap: Mismatch) -> bool:
    """Return whether the first model loses enough against the second, and with certainty."""
    by_loss, by_accuracy = gap.z >= Z_OF_A_GAP, gap.accuracy_z >= Z_OF_A_GAP
    lost, share = gap.running_loss - gap.batch_loss, abs(gap.batch_loss)
    if gap.running_accuracy is None:
        return by_loss and lost >= MIN_LOSS * share
    large = lost >= max(LARGE_LOSS[0] * share, LARGE_LOSS[1])
    return (gap.accuracy_lost >= MIN_GAP and (by_accuracy or by_loss)) or (large and by_loss)


def never_moved(m: Measured) -> list[str]:
    """Return the layers whose running statistics never moved: as at first; or with momentum 0 where that harms."""
    still = [path for path, momentum in m.momenta.items() if momentum == 0 and m.gap is not None and harms(m.gap)]
    return list(dict.fromkeys([*m.unmoved, *still]))


def unmoved_statistics(m: Measured) -> Finding | None:
    """Running statistics that no batch of the training has moved."""
    if not (layers := never_moved(m)):
        return None
    evidence = [
        f"{shown_path(path)}: mean 0 and variance 1, as at first, after {number_of(count, 'batch', 'batches')}."
        for path, count in list(m.unmoved.items())[:3]
    ]
    still = [path for path in layers if m.momenta.get(path) == 0]
    if still:
        evidence.append(f"The momentum is 0 in {len(still)} of {m.num_layers} BatchNorm layers ({listed(still)}).")
    return Finding(
        "unmoved-statistics",
        "The running statistics never moved, and tests normalise by them.",
        evidence,
        {"layers": layers, "momentum-0": still},
        remedies.UNMOVED_BY_MOMENTUM if still else remedies.UNMOVED,
    )


def unanswered(m: Measured) -> list[str]:
    """Return what the measurements cannot tell, one line each."""
    if m.shift is not None and m.skew is None and not m.has_classes:
        return ["label skew: the targets are not one class an example."]
    if m.skew is not None and m.skew.counts:
        return ["feature shift apart from label skew: the clients hold different classes."]
    return []


def remarks(m: Measured) -> list[str]:
    """Return what a reader of an answer without a finding must know, one line each."""
    lines = []
    if m.held:
        lines.append(
            f"{len(m.held)} of {m.num_layers} BatchNorm layers are held in eval mode ({listed(m.held)}): in training "
            "they normalise by fixed statistics, so what is said of batches and of clients leaves them out."
        )
    skew, shift = m.skew, m.shift
    if skew is not None and shift is not None and skew.counts and not _affects(shift):
        lines.append(
            f"the clients hold different classes (total variation {skew.mean:.2f}, by chance {skew.by_chance:.2f}), "
            f"but BatchNorm's statistics hardly differ with them ({shift.excess:.2f} standard deviations above "
            "chance). It is not BatchNorm that this skew harms."
        )
    return lines


def _far(m: Measured, distances: Sequence[float]) -> list[str]:
    """Return the clients that are at least as far as the mean, the furthest first."""
    mean = sum(distances) / max(1, len(distances))
    order = sorted(range(len(distances)), key=lambda k: -distances[k])
    return [m.rest[k] for k in order if m.rest and distances[k] >= mean]


def _furthest(m: Measured, distances: Sequence[float]) -> list[str]:
    lines = [f"The furthest clients: {listed(far)}."] if (far := _far(m, distances)) else []
    if m.apart:
        lines.append(f"Without {listed(m.apart)}, which stand out by themselves.")
    return lines


def _affects(shift: Shift) -> bool:
    everywhere = shift.p_value <= CERTAIN and shift.excess >= MIN_SHIFT
    return everywhere or (shift.peak_p_value <= CERTAIN and shift.excess_in(shift.worst) >= MIN_PEAK)
