"""The class that takes all measurements of a model on the clients' data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fedbn_flwr.batchnorm.reestimation import merge
from fedbn_flwr.doctor.by_batch import Statistics, batch_moments, distance, noise
from fedbn_flwr.doctor.clients import ClientExamples, classes_of
from fedbn_flwr.doctor.differences import (
    Groups,
    class_counts,
    class_skew,
    groups_of,
    shift,
)
from fedbn_flwr.doctor.measured import Measurements
from fedbn_flwr.doctor.mismatch import Loss, mismatch
from fedbn_flwr.errors import DataError, FedBNError
from fedbn_flwr.training.freezing import layers_of


class Measuring:
    """Measures a model on data, without changing the model.

    Args:
        model: the model.
        clients: training examples of each client.
        tests: test examples of each client.
        loss: returns the mean loss of a batch.
        seed: seed of the random groups of examples.
        measured: receives the measurements that the rules need.

    Attributes:
        lacking: measurements that were impossible, each with the reason.
        figures: the entry ``measures`` of the JSON.
    """

    def __init__(
        self,
        model: nn.Module,
        clients: Sequence[ClientExamples],
        tests: Sequence[ClientExamples],
        loss: Loss,
        seed: int,
        measured: Measurements,
    ) -> None:
        self.lacking: list[str] = []
        self._model, self._loss = model, loss
        self._clients, self._tests = clients, tests
        self._generator = torch.Generator().manual_seed(seed)
        self._layers = layers_of(model)
        self._eps = {path: layer.eps for path, layer in self._layers.items()}
        self._rows: dict[str, dict[str, Any]] = {path: {} for path in self._layers}
        self._m = measured
        self.figures: dict[str, Any] = {
            "clients": [client.name for client in clients],
            "examples": measured.examples,
            "batch-sizes": [client.batch_size for client in clients],
            "layers": self._rows,
        }

    def everything(self) -> None:
        """Take all measurements."""
        self._tried("statistics of the batches", self._batches)
        if len(self._clients) > 1:
            self._tried("differences between clients", self._between_clients)
        else:
            self.lacking.append(
                "differences between clients, because there is only one client."
            )
        self._tried("mismatch of training and test", self._mismatch)

    def _batches(self) -> None:
        """Measure the noise of a batch and the error of the running statistics."""
        by_client = [batch_moments(self._model, client) for client in self._clients]
        for path, layer in self._layers.items():
            # A client may lack this layer or all layers, see ``batch_moments``.
            batches = [seen[path] for seen in by_client if path in seen]
            together = list(chain(*batches))
            if not together or path in self._m.in_eval:
                continue
            levels = [noise(seen, layer.eps) for seen in batches if len(seen) > 1]
            if levels:
                self._rows[path]["batch-noise"] = levels
                self._m.noise[path] = sum(levels) / len(levels)
            if layer.running_mean is not None and layer.running_var is not None:
                running = Statistics(layer.running_mean.cpu(), layer.running_var.cpu())
                total = merge(together)
                seen_now = Statistics(total.mean, total.variance)
                far = distance(running, seen_now, layer.eps)
                self._rows[path]["running"] = far._asdict()
                self._m.running[path] = far

    def _between_clients(self) -> None:
        """Compare the clients in classes and in the inputs of BatchNorm."""
        # Skip layers in eval mode: they normalise by fixed statistics, so differences
        # between clients have no effect.
        seen = groups_of(self._model, self._clients, self._generator)
        layers = {
            path: rows
            for path, rows in seen.layers.items()
            if path not in self._m.in_eval
        }
        seen = seen._replace(layers=layers)
        counts = None
        classes = classes_of(self._clients)
        if classes is not None:
            sizes = torch.tensor([len(client) for client in self._clients])
            owner = torch.arange(len(sizes)).repeat_interleave(sizes)
            counts = class_counts(classes, owner)
        if counts is None:
            self.lacking.append(
                "label skew, because the targets are not one class per example."
            )
        else:
            known = counts
            self._tried("label skew", lambda: self._skew(known))
        if layers:
            self._tried(
                "shift of the statistics between clients",
                lambda: self._shift(seen),
            )

    def _skew(self, counts: Tensor) -> None:
        skew = self._m.skew = class_skew(counts)
        self.figures["class-skew"] = {"mean": skew.mean, **vars(skew)}

    def _shift(self, seen: Groups) -> None:
        found = self._m.shift = shift(seen, self._eps)
        for path, value in found.layers.items():
            self._rows[path]["shift"] = value
            self._rows[path]["shift-by-chance"] = found.by_chance[path]
        self.figures["shift"] = {"excess": found.excess, "p-value": found.p_value}

    def _mismatch(self) -> None:
        if sum(map(len, self._tests)) < 2:
            raise DataError("fewer than two test examples. Pass more.")
        gap = mismatch(self._model, self._tests, self._loss, self._generator)
        if not math.isfinite(gap.running_loss + gap.batch_loss):
            raise DataError(
                f"the loss of the test examples is {gap.running_loss:.4g} under running"
                f" statistics and {gap.batch_loss:.4g} under the statistics of the test"
                " batch. Look for NaN and infinity in the weights."
            )
        self._m.gap = gap
        self.figures["train-test-mismatch"] = {
            **vars(gap),
            "accuracy-lost": gap.accuracy_lost,
        }

    def _tried(self, what: str, measure: Callable[[], None]) -> None:
        """Take a measurement, or note why it is impossible."""
        try:
            measure()
        except FedBNError as error:
            self.lacking.append(f"{what}: {error}")
        # The model and the loss are the user's and may raise any exception. The other
        # figures remain valid.
        except Exception as error:
            self.lacking.append(f"{what}: {type(error).__name__}: {error}")
