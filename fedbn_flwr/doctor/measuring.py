"""Takes all measurements of a model on the clients' data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import nn

from fedbn_flwr.batchnorm.reestimation import merge
from fedbn_flwr.doctor.by_batch import Statistics, batch_moments, distance, noise
from fedbn_flwr.doctor.clients import ClientExamples
from fedbn_flwr.doctor.measured import Measurements
from fedbn_flwr.doctor.mismatch import Loss, mismatch
from fedbn_flwr.doctor.sites import compare_sites, inputs_of
from fedbn_flwr.errors import DataError, FedBNError
from fedbn_flwr.training.freezing import layers_of

_DIFFERENCES = "differences between clients"


def measure(
    model: nn.Module,
    clients: Sequence[ClientExamples],
    tests: Sequence[ClientExamples],
    loss: Loss,
    seed: int,
    m: Measurements,
) -> list[str]:
    """Take all measurements, and return why some were impossible.

    The result has one reason for each impossible measurement. The model does not
    change.

    Args:
        model: the model.
        clients: training examples of each client.
        tests: test examples of each client.
        loss: returns the mean loss of a batch.
        seed: seed of the random deals and batches.
        m: receives the measurements.
    """
    lacking, generator = list[str](), torch.Generator().manual_seed(seed)

    def tried(what: str, take: Callable[[], None]) -> None:
        try:
            take()
        except FedBNError as error:
            lacking.append(f"{what}: {error}")
        # The model and the loss are the user's and may raise any exception. The other
        # figures remain valid.
        except Exception as error:
            lacking.append(f"{what}: {type(error).__name__}: {error}")

    def compare() -> None:
        inputs = inputs_of(model, clients, m.in_eval)
        # Without test examples, the training examples take their place.
        of_tests = () if tests is clients else tests
        m.sites = compare_sites(clients, inputs, generator, of_tests)

    if m.num_layers:
        tried("statistics of the batches", lambda: _batches(model, clients, m))
    if m.training.protected:
        lacking.append(f"{_DIFFERENCES}, because the run protects its clients.")
    elif len(clients) == 1:
        lacking.append(f"{_DIFFERENCES}, because there is only one client.")
    # Layers in eval mode normalise by fixed statistics, so differences between clients
    # have no effect.
    elif not m.num_layers or len(m.in_eval) < m.num_layers:
        tried(_DIFFERENCES, compare)
    if m.sites and not m.sites[0].shares:
        lacking.append("label skew, because the targets are not one class per example.")
    if not m.num_layers:
        return [*lacking, "BatchNorm, because the model has no such layer."]
    tried(
        "mismatch of training and test",
        lambda: _mismatch(model, tests, loss, generator, m),
    )
    return lacking


def _batches(
    model: nn.Module, clients: Sequence[ClientExamples], m: Measurements
) -> None:
    """Measure the noise of a batch and the error of the running statistics."""
    by_client = [batch_moments(model, client) for client in clients]
    for path, layer in layers_of(model).items():
        # A client may lack this layer or all layers, see ``batch_moments``.
        batches = [seen[path] for seen in by_client if path in seen]
        together = list(chain(*batches))
        if not together or path in m.in_eval:
            continue
        levels = [noise(seen, layer.eps) for seen in batches if len(seen) > 1]
        if levels:
            m.noise[path] = sum(levels) / len(levels)
        if layer.running_mean is not None and layer.running_var is not None:
            running = Statistics(layer.running_mean.cpu(), layer.running_var.cpu())
            total = merge(together)
            seen_now = Statistics(total.mean, total.variance)
            m.running[path] = distance(running, seen_now, layer.eps)


def _mismatch(
    model: nn.Module,
    tests: Sequence[ClientExamples],
    loss: Loss,
    generator: torch.Generator,
    m: Measurements,
) -> None:
    """Measure the mismatch of training and test."""
    if sum(map(len, tests)) < 2:
        raise DataError("fewer than two test examples. Pass more.")
    gap = mismatch(model, tests, loss, generator)
    if not math.isfinite(gap.running_loss + gap.batch_loss):
        raise DataError(
            f"the loss of the test examples is {gap.running_loss:.4g} under running"
            f" statistics and {gap.batch_loss:.4g} under the statistics of the test"
            " batch. Look for NaN and infinity in the weights."
        )
    m.gap = gap
