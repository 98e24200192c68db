"""The class that takes all measurements of a model on the clients' data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fedbn_flwr.batchnorm.reestimation import merge
from fedbn_flwr.doctor import each_client
from fedbn_flwr.doctor.by_batch import Statistics, batch_moments, distance, noise
from fedbn_flwr.doctor.clients import ClientExamples, classes_of
from fedbn_flwr.doctor.differences import (
    Groups,
    class_counts,
    class_skew,
    groups_of,
    shift,
)
from fedbn_flwr.doctor.findings import number_of
from fedbn_flwr.doctor.measured import Measurements
from fedbn_flwr.doctor.mismatch import Loss, accuracy, mismatch
from fedbn_flwr.doctor.state import TensorState
from fedbn_flwr.doctor.thresholds import MIN_CLIENTS
from fedbn_flwr.errors import DataError, FedBNError
from fedbn_flwr.training.freezing import layers_of
from fedbn_flwr.training.model_state import copied, load_state


class Measuring:
    """Measures a model on data, without changing the model.

    Args:
        model: the model.
        clients: training examples of each client.
        tests: test examples of each client.
        loss: returns the mean loss of a batch.
        seed: seed of the random groups of examples.
        measured: receives the measurements that the rules need.
        own: entries of the state that each client keeps, by client.

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
        own: Mapping[str, TensorState],
    ) -> None:
        self.lacking: list[str] = []
        self._model, self._loss, self._own = model, loss, own
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
        """Take all measurements.

        Differences between clients are measured before accuracies, because accuracies
        are compared only if the classes are similar.
        """
        self._tried("statistics of the batches", self._batches)
        if len(self._clients) > 1:
            self._tried("differences between clients", self._between_clients)
        else:
            self.lacking.append(
                "differences between clients, because there is only one client."
            )
        self._tried("mismatch of training and test", self._mismatch)
        self._tried("accuracy of each client", self._accuracy)
        each = vars(self._m.each).items()
        self.figures["each-client"] = {
            name: vars(one) for name, one in each if one is not None
        }

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
        """Measure the odd clients first, then differences between all others."""
        m = self._m
        # Skip layers in eval mode: they normalise by fixed statistics, so differences
        # between clients have no effect.
        seen = groups_of(self._model, self._clients, self._generator)
        layers = {
            path: rows for path, rows in seen.layers.items() if path not in m.in_eval
        }
        seen = seen._replace(layers=layers)
        counts = None
        classes = classes_of(self._clients)
        if classes is not None:
            sizes = torch.tensor([len(client) for client in self._clients])
            owner = torch.arange(len(sizes)).repeat_interleave(sizes)
            counts = class_counts(classes, owner)
        self._tried(
            "one client against the others", lambda: self._each_client(seen, counts)
        )

        # Leave out the odd clients, because one odd client must not appear as a skew of
        # the whole federation.
        rest = [k for k in range(len(m.names)) if k not in m.each.apart]
        if len(rest) < 2:
            rest = list(range(len(m.names)))
        m.rest = [m.names[k] for k in rest]
        m.apart = [name for name in m.names if name not in m.rest]

        # Compare the other clients in classes and in the inputs of BatchNorm.
        if counts is None:
            self.lacking.append(
                "label skew, because the targets are not one class per example."
            )
        else:
            of_rest = counts[rest]
            self._tried("label skew", lambda: self._skew(of_rest))
        if layers:
            self._tried(
                "shift of the statistics between clients",
                lambda: self._shift(seen.of(rest)),
            )

    def _each_client(self, seen: Groups, counts: Tensor | None) -> None:
        if len(self._clients) < MIN_CLIENTS:
            raise DataError(
                f"{number_of(len(self._clients), 'client')}, fewer than the"
                f" {MIN_CLIENTS} that this comparison needs."
            )
        inputs = each_client.statistics(seen, self._eps) if seen.layers else None
        mix = None if counts is None else each_client.class_mixes(counts)
        shares = [each_client.distinct_share(one.inputs) for one in self._clients]
        repeated = each_client.below_median(shares, self._m.examples)
        self._m.each = each_client.EachClient(mix, inputs, repeated)

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

    def _accuracy(self) -> None:
        """Measure each client's accuracy, with its local entries if it keeps some."""
        m, found = self._m, []
        for client in self._clients:
            model = self._model
            if client.name in self._own:
                model = copied(model)
                load_state(model, {**model.state_dict(), **self._own[client.name]})
            of_client = accuracy(model, client, self._loss, self._generator)
            if of_client is None:
                return
            found.append(of_client)
        m.accuracy = self.figures["accuracy"] = found
        if len(found) < MIN_CLIENTS or m.skew is None:
            return
        # If the classes differ by design, the accuracies differ as well, and the
        # comparison would be meaningless.
        if m.skew.counts:
            raise DataError(
                "the clients cannot be compared, because they have different classes."
            )
        below = each_client.below_median(found, m.examples)
        m.each = replace(m.each, below=below)

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
