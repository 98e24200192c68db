"""Rules for the clients' data and batches, each from measurements to a finding.

Each rule has the same order as in ``rules``: first the conditions without a finding,
then the evidence, the remedies and the finding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedbn_flwr.doctor import remedies, situations
from fedbn_flwr.doctor.differences import Shift
from fedbn_flwr.doctor.findings import Finding, listed, number_of
from fedbn_flwr.doctor.measured import Measurements
from fedbn_flwr.doctor.mismatch import Mismatch
from fedbn_flwr.doctor.thresholds import (
    LARGE_LOSS,
    MIN_GAP,
    MIN_LOSS,
    MIN_NOISE,
    SMALL_BATCH,
    Z_OF_A_GAP,
)
from fedbn_flwr.norms.replaced_layers import shown_path


def small_batch(m: Measurements) -> Finding | None:
    """Report batches of up to four examples, because their statistics are noisy."""
    # A batch size of 0 is unknown.
    given = m.batch_sizes or [m.training.batch_size]
    sizes = [size for size in given if size]
    small = [k for k, size in enumerate(given) if 0 < size <= SMALL_BATCH]
    # If less than half of the clients have small batches, skip clients whose batch
    # contains all of their examples.
    if 2 * len(small) < len(sizes):
        small = [k for k in small if given[k] < m.examples[k]]
    if not small:
        return None
    # If all layers are in eval mode, they ignore the batch.
    if m.num_layers and len(m.in_eval) == m.num_layers:
        return None
    # Large images have many values per channel, so 3 or 4 images may be enough.
    least = min(given[k] for k in small)
    if m.noise and max(m.noise.values()) < MIN_NOISE and least > 2:
        return None

    where, names = "", [m.names[k] for k in small if m.names]
    if names:
        where = f" at {len(names)} of {len(sizes)} clients ({listed(names)})"
    evidence = [f"Batches have {number_of(least, 'example')}{where}."]
    numbers: dict[str, object] = {"batch-sizes": sizes, "clients": names}
    if m.noise:
        worst = max(m.noise, key=lambda path: m.noise[path])
        evidence.append(
            f"Within one client, the mean of a batch varies by {m.noise[worst]:.2f}"
            f" standard deviations in layer {shown_path(worst)}, so each example is shifted"
            " at random by as much."
        )
        numbers |= {"noise": m.noise[worst], "layer": worst}
    tries = situations.SMALL_BATCHES.remedies
    if m.training.batch_size > SMALL_BATCH:
        # The batches are small because the clients have no more examples. Skip the
        # first remedy, a larger batch.
        tries = tries[1:]
    what = "The batches are too small for BatchNorm."
    return Finding("small-batch", what, evidence, numbers, tries)


def clients_named(names: Sequence[str]) -> str:
    """Return "Client 3", "Clients 1, 3"."""
    return f"Client{'s' if len(names) > 1 else ''} {listed(names)}"


def label_skew(m: Measurements) -> Finding | None:
    """Report classes and BatchNorm inputs that differ between clients beyond chance."""
    skew, shift = m.skew, m.shift
    if skew is None or shift is None:
        return None
    # Label skew that does not change BatchNorm's inputs cannot do harm by BatchNorm.
    # ``diagnose`` notes such a skew.
    if not skew.counts or not shift.counts:
        return None

    evidence = [
        f"The class mix of a client is {skew.mean:.2f} away from the mix of all"
        f" clients (total variation, 0 to 1); by chance it would be"
        f" {skew.by_chance:.2f} ({_p(skew.p_value)}).",
        f"BatchNorm sees the difference: {_shifted(shift)}",
        *_furthest(m, skew.distances),
    ]
    steps = m.training.local_steps
    if steps:
        evidence.append(
            f"The median client takes E = {number_of(steps, 'local step')}."
        )
    numbers = {
        **_numbers(m, shift, skew.distances),
        "class-distance": skew.mean,
        "class-distance-by-chance": skew.by_chance,
        "local-steps": steps or None,
    }
    # The remedies depend on E, the number of local steps: FedTAN's exchanges pay if E
    # is small, and frozen statistics work if E is large.
    tries = situations.label_skew(steps).remedies
    what = (
        "The clients hold different classes (label skew), and BatchNorm's statistics"
        " differ with them."
    )
    return Finding("label-skew", what, evidence, numbers, tries)


def feature_shift(m: Measurements) -> Finding | None:
    """Report inputs of BatchNorm that differ between clients with similar classes."""
    skew, shift = m.skew, m.shift
    if skew is None or shift is None:
        return None
    # If classes are skewed, they may cause the shift, and ``label_skew`` reports it.
    if skew.counts or not shift.counts:
        return None
    evidence = [
        f"In BatchNorm's inputs {_shifted(shift)}",
        "The classes are not the cause: the class mix of a client is"
        f" {skew.mean:.2f} away from the mix of all clients, and by chance it would be"
        f" {skew.by_chance:.2f}.",
        *_furthest(m, shift.distances),
    ]
    what = (
        "The same classes look different at different clients (feature shift: other"
        " devices, sites, domains)."
    )
    numbers = _numbers(m, shift, shift.distances)
    tries = situations.FEATURE_SHIFT.remedies
    return Finding("feature-shift", what, evidence, numbers, tries)


def clients_differ(m: Measurements) -> Finding | None:
    """Report inputs of BatchNorm that differ between clients, if classes are unknown."""
    shift = m.shift
    if shift is None or m.skew is not None or not shift.counts:
        return None
    evidence = [
        f"In BatchNorm's inputs {_shifted(shift)}",
        *_furthest(m, shift.distances),
    ]
    what = (
        "BatchNorm's statistics differ between clients. Feature shift and label skew"
        " cannot be distinguished here."
    )
    numbers = _numbers(m, shift, shift.distances)
    return Finding("clients-differ", what, evidence, numbers, remedies.CLIENTS_DIFFER)


def _shifted(shift: Shift) -> str:
    """Return the evidence of a shift, in the layer that is furthest above chance."""
    worst = shift.worst
    return (
        f"statistics of a client are {shift.layers[worst]:.2f} standard deviations from"
        f" the statistics of all clients in layer {shown_path(worst)}; by chance it would be"
        f" {shift.by_chance[worst]:.2f} ({_p(shift.p_value)})."
    )


def _p(value: float) -> str:
    return f"p = {value:.3f}" if value >= 0.001 else "p < 0.001"


def _numbers(
    m: Measurements, shift: Shift, distances: Sequence[float]
) -> dict[str, object]:
    worst = shift.worst
    return {
        "shift": shift.layers[worst],
        "by-chance": shift.by_chance[worst],
        "layer": worst,
        "clients": _far(m, distances),
    }


def _far(m: Measurements, distances: Sequence[float]) -> list[str]:
    """Return the clients whose distance is at least the mean, the furthest first."""
    mean = sum(distances) / max(1, len(distances))
    order = sorted(zip(distances, m.names, strict=True), key=lambda pair: -pair[0])
    return [name for distance, name in order if distance >= mean]


def _furthest(m: Measurements, distances: Sequence[float]) -> list[str]:
    """Return evidence about the clients that differ most."""
    far = _far(m, distances)
    return [f"The furthest clients: {listed(far)}."] if far else []


def train_test_mismatch(m: Measurements) -> Finding | None:
    """Report running statistics that test worse than the statistics of test batches."""
    gap = m.gap
    if gap is None or not _harms(gap):
        return None

    running, batch = f"Loss {gap.running_loss:.4g}", f"{gap.batch_loss:.4g}"
    if gap.running_accuracy is not None:
        running = f"Accuracy {gap.running_accuracy:.3f} and loss {gap.running_loss:.4g}"
        batch = f"{gap.batch_accuracy:.3f} and {gap.batch_loss:.4g}"
    evidence = [
        f"{running} under running statistics, {batch} under the statistics of mixed"
        f" test batches, for the same {gap.examples} examples and the same weights (z ="
        f" {gap.z:.1f})."
    ]
    # Report the layer whose running statistics are furthest off. Layers with a
    # non-finite distance have no number to report.
    furthest = {}
    for path, far in m.running.items():
        if math.isfinite(far.mean + far.variance):
            furthest[path] = max(far.mean, far.variance)
    if furthest:
        worst = max(furthest, key=lambda path: furthest[path])
        far = m.running[worst]
        evidence.append(
            f"In layer {shown_path(worst)} the running mean is {far.mean:.2f}"
            " standard deviations from the mean of all clients' examples under these"
            f" weights, and the logarithm of the running variance is {far.variance:.2f} off."
        )
    tries = remedies.MISMATCH
    if _never_moved(m):
        # Freezing statistics that never moved would preserve the fault.
        tries = remedies.MISMATCH_OF_UNMOVED
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
        tries,
    )


def _harms(gap: Mismatch) -> bool:
    """Return whether running statistics make tests certainly and considerably worse."""
    if gap.z < Z_OF_A_GAP:
        return False
    lost, share = gap.running_loss - gap.batch_loss, abs(gap.batch_loss)
    if gap.running_accuracy is None:
        return lost >= MIN_LOSS * share
    # If there is an accuracy, require a large rise, because the loss may rise although
    # the predicted classes stay the same.
    loss_from = max(LARGE_LOSS[0] * share, LARGE_LOSS[1])
    return gap.accuracy_lost >= MIN_GAP or lost >= loss_from


def _never_moved(m: Measurements) -> list[str]:
    """Return the layers whose running statistics never moved.

    The statistics have their initial values, or the layer has momentum 0. Momentum 0
    counts only if running statistics make tests worse; otherwise it is a choice.
    """
    layers = [*m.unmoved]
    if m.gap is not None and _harms(m.gap):
        layers += [path for path, momentum in m.momenta.items() if momentum == 0]
    return list(dict.fromkeys(layers))


def unmoved_statistics(m: Measurements) -> Finding | None:
    """Report running statistics that no training batch ever moved."""
    layers = _never_moved(m)
    if not layers:
        return None
    evidence = [
        f"Layer {shown_path(path)}: mean 0 and variance 1, the initial values, after"
        f" {number_of(count, 'batch', 'batches')}."
        for path, count in [*m.unmoved.items()][:3]
    ]
    tries = remedies.UNMOVED
    still = [path for path in layers if m.momenta.get(path) == 0]
    if still:
        evidence.append(
            f"The momentum is 0 in {len(still)} of {m.num_layers} BatchNorm layers"
            f" ({listed(still)})."
        )
        tries = remedies.UNMOVED_BY_MOMENTUM
    what = "The running statistics never moved, but tests normalise by them."
    numbers = {"layers": layers, "momentum-0": still}
    return Finding("unmoved-statistics", what, evidence, numbers, tries)
