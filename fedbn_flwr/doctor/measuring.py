"""All measurements of a model on the clients' data, in order: batches, clients, tests."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.batchnorm.reestimation import Moments, merge
from fedbn_flwr.doctor import each_client
from fedbn_flwr.doctor.by_batch import (
    Distance,
    Statistics,
    batch_moments,
    deviation,
    distance,
    layers_of,
    noise,
    pooled,
)
from fedbn_flwr.doctor.clients import ClientData, classes_of
from fedbn_flwr.doctor.differences import (
    Groups,
    class_counts,
    class_skew,
    group_means,
    groups_of,
    overlap,
    shift,
)
from fedbn_flwr.doctor.findings import listed, number_of
from fedbn_flwr.doctor.measured import Measured
from fedbn_flwr.doctor.mismatch import Loss, accuracy_by_class, mismatch, scores
from fedbn_flwr.doctor.state import extremes
from fedbn_flwr.doctor.thresholds import MIN_CLIENTS, MIN_EXAMPLES, MIN_SHARE_BELOW
from fedbn_flwr.errors import DataError, FedBNError
from fedbn_flwr.training.copying import copied
from fedbn_flwr.training.wrappers import load_state

__all__ = ["Measuring"]

_SORTED = 32  # examples in a batch of sorted test examples

Figures = dict[str, Any]


class Measuring:
    """Measures a model on data; the model does not change.

    Args:
        model: the model.
        clients: training examples.
        tests: test examples.
        loss: returns the mean loss of a batch.
        seed: of the groups of examples.
        measured: takes the measurements that the rules need.
        own: entries of the state that clients keep, by client.

    Attributes:
        lacking: what could not be measured, and why.
    """

    def __init__(
        self,
        model: nn.Module,
        clients: Sequence[ClientData],
        tests: Sequence[ClientData],
        loss: Loss,
        seed: int,
        measured: Measured,
        own: Mapping[str, Mapping[str, Tensor]],
    ) -> None:
        self.lacking = list[str]()
        self._model, self._clients, self._tests, self._loss = model, clients, tests, loss
        self._own = own
        self._generator = torch.Generator().manual_seed(seed)
        self._layers = layers_of(model)
        self._rows: dict[str, Figures] = {path: {} for path in self._layers}  # figures by layer
        self._m = measured

    def everything(self) -> Figures:
        """Do all measurements; return the figures, ``measures`` of the JSON."""
        figures: Figures = {
            "clients": [client.name for client in self._clients],
            "examples": [len(client) for client in self._clients],
            "batch-sizes": [client.batch_size for client in self._clients],
            "layers": self._rows,
        }
        figures |= self._tried("statistics of the batches", self._batches)
        figures |= self._tried("differences between clients", self._between_clients)
        figures |= self._tried("mismatch of training and test", self._mismatch)
        figures |= self._tried("accuracy and loss of each client", self._scores)
        each = self._m.each
        by_name = {"scale": each.scale, "centre": each.centre, "class-mix": each.mix, "inputs": each.inputs}
        by_name |= {"below": each.below, "loss-above": each.loss}
        figures["each-client"] = {name: vars(one) for name, one in by_name.items() if one is not None}
        return figures

    def _batches(self) -> Figures:
        moments = [batch_moments(self._model, client) for client in self._clients]
        for client, seen in zip(self._clients, moments, strict=True):
            if not seen:
                what = f"statistics of the batches of client {client.name}"
                self.lacking.append(f"{what}: its batches are too small for BatchNorm.")
        for path, layer in self._layers.items():
            by_client = [list(client.get(path, ())) for client in moments]
            if not any(by_client):
                continue
            row, together, running = self._rows[path], list(itertools.chain(*by_client)), _running(layer)
            row |= _of_batches(layer.eps, by_client, running or pooled(together))
            levels = [level for level in row["batch-noise"] if level is not None]
            if levels and path not in self._m.held:
                self._m.noise[path] = sum(levels) / len(levels)
            self._m.in_data[path] = extremes(pooled(together).variance, layer.eps)
            if running:
                total = merge(together)
                far = distance(running, Statistics(total.mean, total.variance), layer.eps)
                row["running"] = far._asdict()
                if path not in self._m.held:
                    self._m.running[path] = far
        return {}

    def _between_clients(self) -> Figures:
        seen = groups_of(self._model, self._clients, self._generator)
        if seen.uncalled:
            it = "it" if len(seen.uncalled) == 1 else "them"
            self.lacking.append(f"{listed(seen.uncalled)}: the model does not call {it} in eval mode.")
        count = sum(map(len, self._clients))
        if count >= MIN_EXAMPLES:
            self._m.blocked, self._m.same_output = seen.blocked, seen.same_output
        else:
            few = number_of(count, "example")
            self.lacking.append(f"dead layers by their outputs: {few}, of {MIN_EXAMPLES} that it needs.")
        if len(self._clients) < 2:
            self.lacking.append("differences between clients: there is one.")
            return {}
        layers = {path: moments for path, moments in seen.layers.items() if path not in self._m.held}
        seen = replace(seen, layers=layers)
        classes = classes_of(self._clients)
        self._m.has_classes = classes is not None
        counts = None if classes is None else class_counts(classes, _owners(self._clients))
        figures = self._tried("one client against the others", lambda: self._each_client(seen, counts))
        figures |= self._tried("label skew", lambda: self._skew(counts))
        if layers:
            figures |= self._tried("shift of the statistics between clients", lambda: self._shift(seen))
        return figures

    def _each_client(self, seen: Groups, counts: Tensor | None) -> Figures:
        if len(self._clients) < MIN_CLIENTS:
            raise DataError(f"{number_of(len(self._clients), 'client')}, of {MIN_CLIENTS} that it needs.")
        if self._m.not_finite:
            raise DataError("inputs hold NaN or infinity.")
        scale = centre = mix = inputs = None
        if all(client.inputs.is_floating_point() for client in self._clients):  # the number of a word has no unit
            scale, centre = each_client.input_units(self._clients)
        if seen.layers:
            eps = {path: self._layers[path].eps for path in seen.layers}
            inputs = each_client.statistics(seen.layers, seen.owner, eps)
        self._m.each = replace(self._m.each, scale=scale, centre=centre, inputs=inputs)
        if counts is not None:
            mix = each_client.class_mixes(counts)
        self._m.each = replace(self._m.each, mix=mix)
        return {}

    def _skew(self, counts: Tensor | None) -> Figures:
        """Measure how the classes of all clients differ; the rules leave out clients that stand out by themselves."""
        m, apart = self._m, self._m.each.apart
        m.apart = [name for k, name in enumerate(m.names) if k in apart]
        m.rest = [name for k, name in enumerate(m.names) if k not in apart]
        if counts is None:
            return {}
        whole = m.skew = class_skew(counts)
        if apart and len(m.rest) > 1:
            m.skew = class_skew(counts[[k for k in range(len(counts)) if k not in apart]])
        return {"class-skew": {"mean": whole.mean, **vars(whole)}}

    def _shift(self, seen: Groups) -> Figures:
        """Measure how the statistics of all clients differ; the rules leave out the same clients."""
        eps = {path: self._layers[path].eps for path in seen.layers}
        whole = self._m.shift = shift(seen.layers, seen.owner, eps)
        if self._m.apart and len(self._m.rest) > 1:
            kept, owner = _without(seen.owner, self._m.each.apart)
            places = torch.nonzero(kept).flatten().tolist()
            layers = {path: [moments[at] for at in places] for path, moments in seen.layers.items()}
            self._m.shift = shift(layers, owner, eps)
        for path, value in whole.layers.items():
            self._rows[path] |= {"shift": value, "shift-by-chance": whole.by_chance[path]}
        return {
            "shift": {
                "excess": whole.excess,
                "p-value": whole.p_value,
                "peak": whole.excess_in(whole.worst),
                "peak-p-value": whole.peak_p_value,
            }
        }

    def _mismatch(self) -> Figures:
        if sum(map(len, self._tests)) < 2:
            raise DataError("it needs two test examples.")
        gap = mismatch(self._model, self._tests, self._loss, self._generator)
        if not math.isfinite(gap.running_loss + gap.batch_loss):
            raise DataError(
                f"the loss of the test examples is {gap.running_loss:.4g} under running statistics, "
                f"{gap.batch_loss:.4g} under those of the test batch. Look for NaN and infinity in weights and inputs."
            )
        self._m.gap = gap
        if self._m.training_layers or self._m.untracked or self._m.training.tested_by_batch:
            self._m.sorted_accuracy = accuracy_by_class(self._model, self._tests, _SORTED)
        return {"train-test-mismatch": {**vars(gap), "accuracy-lost": gap.accuracy_lost}}

    def _scored(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return ``scores`` of all clients; a client that keeps entries is scored with its own model."""
        if not self._own:
            return scores(self._model, self._clients, self._loss, self._generator)
        model, first, columns = copied(self._model), 0, []
        shared = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, Tensor)}
        for client in self._clients:
            load_state(model, {**shared, **self._own.get(client.name, {})})
            losses, right, places = scores(model, [client], self._loss, self._generator)
            columns.append((losses, torch.empty(0) if right is None else right, places + first))
            first += len(client)
        losses, right, places = (torch.cat(column) for column in zip(*columns, strict=True))
        return losses, right if len(right) == len(losses) else None, places

    def _scores(self) -> Figures:
        losses, right, places = self._scored()
        owner = _owners(self._clients)[places]
        self._m.loss = group_means(losses[:, None], owner)[:, 0].tolist()
        self._m.accuracy = [] if right is None else group_means(right[:, None], owner)[:, 0].tolist()
        if len(self._clients) >= MIN_CLIENTS:
            if right is None:
                self._m.each = replace(self._m.each, loss=each_client.losses(losses, owner))
            elif (classes := classes_of(self._clients)) is not None:
                classes = classes[places]
                if (share := overlap(classes, owner)) >= MIN_SHARE_BELOW:
                    self._m.each = replace(self._m.each, below=each_client.accuracies(right, classes, owner))
                else:
                    self.lacking.append(
                        f"accuracy of one client against the others: the clients' classes overlap by {share:.0%} only, "
                        f"of {MIN_SHARE_BELOW:.0%} that it needs (100 % = all have the same mix)."
                    )
        return {"accuracy": self._m.accuracy or None, "loss": self._m.loss}

    def _tried(self, what: str, measure: Callable[[], Figures]) -> Figures:
        """Return the figures of a measurement; if it cannot be done, note why."""
        try:
            return measure()
        except FedBNError as error:
            self.lacking.append(f"{what}: {error}")
        except Exception as error:  # the model and the loss are the user's; the other figures are still true
            self.lacking.append(f"{what}: {type(error).__name__}: {error}")
        return {}


def _owners(clients: Sequence[ClientData]) -> Tensor:
    return torch.cat([torch.full((len(client),), k) for k, client in enumerate(clients)])


def _without(owner: Tensor, clients: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return which examples are of other clients, bool (N,), and the owners of these, numbered anew."""
    kept = ~torch.isin(owner, torch.tensor([*clients], dtype=owner.dtype))
    return kept, torch.unique(owner[kept], return_inverse=True)[1]


def _running(layer: _BatchNorm) -> Statistics | None:
    """Return the layer's running statistics, if it has some."""
    if layer.running_mean is None or layer.running_var is None:
        return None
    return Statistics(layer.running_mean.cpu(), layer.running_var.cpu())


def _of_batches(eps: float, by_client: Sequence[Sequence[Moments]], reference: Statistics) -> Figures:
    """Return the figures of a layer, given the moments of each client's batches; deviations are from the reference."""
    distances = [deviation(batches, reference, eps) for batches in by_client]
    columns = zip(*distances, strict=True)
    return {
        "batch-deviation": {name: [*column] for name, column in zip(Distance._fields, columns, strict=True)},
        "batch-noise": [noise(batches, eps) for batches in by_client],
    }
