"""Rules for the clients' data and batches, each from measurements to a finding.

Each rule has the same order as in ``rules``: first the conditions without a finding,
then the evidence, the remedies and the finding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedbn_flwr.doctor import remedies
from fedbn_flwr.doctor.findings import Finding, listed, number_of
from fedbn_flwr.doctor.measured import Measurements
from fedbn_flwr.doctor.mismatch import Mismatch
from fedbn_flwr.doctor.thresholds import (
    FEW_STEPS,
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
    small = [one for one in m.clients if 0 < one.batch_size <= SMALL_BATCH]
    # If less than half of the clients have small batches, skip clients whose batch
    # contains all of their examples.
    if 2 * len(small) < len(m.clients):
        small = [one for one in small if one.batch_size < len(one)]
    # Without clients, only the settings of the training show the batch size.
    sizes = [one.batch_size for one in small]
    if not m.clients and 0 < m.training.batch_size <= SMALL_BATCH:
        sizes = [m.training.batch_size]
    if not sizes:
        return None
    # If all layers are in eval mode, they ignore the batch.
    if m.num_layers and len(m.in_eval) == m.num_layers:
        return None
    # Large images have many values per channel, so 3 or 4 images may be enough.
    least = min(sizes)
    if m.noise and max(m.noise.values()) < MIN_NOISE and least > 2:
        return None

    where, names = "", [one.name for one in small]
    if names:
        where = f" at {len(names)} of {len(m.clients)} clients ({listed(names)})"
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
    tries = remedies.SMALL_BATCHES
    if m.training.batch_size > SMALL_BATCH:
        # The batches are small because the clients have no more examples. Skip the
        # first remedy, a larger batch.
        tries = tries[1:]
    what = "The batches are too small for BatchNorm."
    return Finding("small-batch", what, evidence, numbers, tries)


def clients_named(names: Sequence[str]) -> str:
    """Return "Client 3", "Clients 1, 3"."""
    return f"Client{'s' if len(names) > 1 else ''} {listed(names)}"


def damaged_data(m: Measurements) -> Finding | None:
    """Report damage in the data of clients, a sentence for each."""
    clients: dict[str, list[str]] = {}
    for site in m.sites:
        for sentence in site.damage:
            clients.setdefault(sentence, []).append(site.client)
    if not clients:
        return None
    named = [site.client for site in m.sites if site.damage]
    evidence = [f"{clients_named(of)}: {text}" for text, of in clients.items()]
    what = f"{clients_named(named)}: the data may be damaged."
    return Finding(
        "damaged-data", what, evidence, {"clients": named}, remedies.DAMAGED_DATA
    )


def label_skew(m: Measurements) -> Finding | None:
    """Report clients whose class shares differ from the others' class shares."""
    odd = [site for site in m.sites if site.other_labels]
    odd.sort(key=lambda site: -site.label_difference)
    if not odd:
        return None
    evidence = [
        f"Client {site.client}: {site.labels_in_words}. All class shares are"
        f" {site.label_difference:.2f} away from those of the other clients (total"
        " variation, 0 to 1), beyond chance."
        for site in odd[:3]
    ]
    steps = m.training.local_steps
    if steps:
        evidence.append(
            f"The median client takes E = {number_of(steps, 'local step')}."
        )
    named = [site.client for site in odd]
    # FedTAN's exchanges pay if E, the number of local steps, is small. Frozen statistics
    # work if E is large, and cost no messages if E is unknown.
    few = 0 < steps < FEW_STEPS
    return Finding(
        "label-skew",
        f"{clients_named(named)}: other labels than the other clients (label skew).",
        evidence,
        {"clients": named, "local-steps": steps or None},
        remedies.LABEL_SKEW_FEW_STEPS if few else remedies.LABEL_SKEW,
    )


def feature_shift(m: Measurements) -> Finding | None:
    """Report clients whose inputs differ from the others' inputs at equal classes."""
    odd = [site for site in m.sites if site.other_inputs]
    odd.sort(key=lambda site: -abs(site.inputs[site.other_inputs[0]]))
    if not odd:
        return None
    evidence = [
        f"Client {site.client}, in standard deviations from the other clients at equal"
        f" classes: {site.inputs_in_words} (beyond chance)."
        for site in odd[:3]
    ]
    named, columns = [site.client for site in odd], odd[0].other_inputs
    return Finding(
        "feature-shift",
        f"{clients_named(named)}: other inputs ({listed(columns)}) than the other"
        " clients (feature shift: other devices, units, domains).",
        evidence,
        {"clients": named, "columns": columns},
        remedies.FEATURE_SHIFT,
    )


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
    # the predicted classes do not change.
    loss_from = max(LARGE_LOSS[0] * share, LARGE_LOSS[1])
    accuracy_lost = (gap.batch_accuracy or 0.0) - gap.running_accuracy
    return accuracy_lost >= MIN_GAP or lost >= loss_from


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
