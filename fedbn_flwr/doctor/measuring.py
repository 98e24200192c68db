"""All measurements of a model on the clients' data, in order: batches, examples, clients, gradients, tests."""

from __future__ import annotations

import itertools
import math
import statistics
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
    window_variance,
)
from fedbn_flwr.doctor.by_example import Features, LayerFeatures, features
from fedbn_flwr.doctor.clients import ClientData, classes_of, examples_of_b
from fedbn_flwr.doctor.data_rules import harms
from fedbn_flwr.doctor.each_client import group_means
from fedbn_flwr.doctor.findings import listed, number_of
from fedbn_flwr.doctor.gradients import Batch, deviations, regrouped
from fedbn_flwr.doctor.heterogeneity import ClassSkew, Shift, class_skew, overlap, regroupings, shift
from fedbn_flwr.doctor.measured import Measured
from fedbn_flwr.doctor.mismatch import Loss, accuracy_by_class, compared, mismatch, scores
from fedbn_flwr.doctor.state import extremes
from fedbn_flwr.doctor.thresholds import (
    LOW_GAMMA,
    MAX_CLIENTS_B,
    MAX_LAYERS_TRIED,
    MIN_CLIENTS,
    MIN_EXAMPLES,
    MIN_SHARE,
    MIN_SHARE_BELOW,
    REGROUPINGS,
)
from fedbn_flwr.errors import ConfigError, DataError, FedBNError
from fedbn_flwr.training.copying import copied
from fedbn_flwr.training.wrappers import load_state

__all__ = ["Measuring"]

_REGROUPED = 3  # regroupings of B_i: each is two forward and backward passes of every client
_BATCH_B = 256  # examples of a client in B_i at most
_SORTED = 32  # examples in a batch of sorted test examples

Figures = dict[str, Any]


class Measuring:
    """Measures a model on data; the model does not change.

    Args:
        model: the model.
        clients: training examples.
        tests: test examples.
        loss: returns the mean loss of a batch.
        seed: of the regroupings.
        measured: takes the measurements that the rules need.
        own: entries of the state that clients keep, by client.

    Attributes:
        lacking: what could not be measured, and why.
        notes: how a measurement differs from the training.
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
        self.lacking, self.notes = list[str](), list[str]()
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
        figures |= self._tried("differences between clients, and dead channels", self._by_example)
        figures |= self._tried("gradient deviation B_i", self._gradients)
        figures |= self._tried("mismatch of training and test", self._mismatch)
        figures |= self._tried("accuracy and loss of each client", self._scores)
        figures |= self._tried("layers with a small gamma", self._small_gammas)
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

    def _by_example(self) -> Figures:
        seen = self._examples()
        if len(self._clients) < 2:
            self.lacking.append("differences between clients: there is one.")
            return {}
        layers = {path: layer for path, layer in seen.layers.items() if path not in self._m.held}
        figures = self._tried("one client against the others", lambda: self._each_client(seen, layers))
        return figures | (self._differences(seen, layers) if layers else {})

    def _each_client(self, seen: Features, layers: Mapping[str, LayerFeatures]) -> Figures:
        if len(self._clients) < MIN_CLIENTS:
            raise DataError(f"{number_of(len(self._clients), 'client')}, of {MIN_CLIENTS} that it needs.")
        if self._m.not_finite:
            raise DataError("inputs hold NaN or infinity.")
        scale = centre = mix = inputs = None
        if all(client.inputs.is_floating_point() for client in self._clients):  # the number of a word has no unit
            scale, centre = each_client.input_units(self._clients)
        classes = seen.classes
        if classes is not None:
            mix = self._class_mixes(classes, seen.owner)
        if layers:
            eps = {path: self._layers[path].eps for path in layers}
            shared = classes is not None and overlap(classes, seen.owner) >= MIN_SHARE
            inputs = each_client.statistics(layers, seen.owner, eps, classes if shared else None)
        self._m.each = replace(self._m.each, scale=scale, centre=centre, mix=mix, inputs=inputs)
        return {}

    def _examples(self) -> Features:
        seen = features(self._model, self._clients, self._generator)
        for reason in sorted({*seen.left_out.values()}):
            paths = sorted(path for path, why in seen.left_out.items() if why == reason)
            self.lacking.append(f"differences of the clients in {listed(paths)}: {reason}.")
        if uncalled := sorted({*self._layers} - {*seen.layers, *seen.left_out}):
            it = "it" if len(uncalled) == 1 else "them"
            self.lacking.append(f"{listed(uncalled)}: the model does not call {it} in eval mode.")
        if (count := len(seen.owner)) < MIN_EXAMPLES:
            few = number_of(count, "example")
            self.lacking.append(f"dead layers by their outputs: {few}, of {MIN_EXAMPLES} that it needs.")
            return seen
        self._m.blocked, self._m.same_output = seen.blocked, seen.same_output
        self._m.constant = {path: (int(f.constant().sum()), len(f.outputs.low)) for path, f in seen.layers.items()}
        for path, (dead, channels) in self._m.constant.items():
            self._rows[path] |= {"constant-channels": dead, "channels": channels}
        return seen

    def _class_mixes(self, classes: Tensor, owner: Tensor) -> each_client.Compared:
        """Return the clients' class mixes; no client stands out where the others differ, too, by design."""
        mix = each_client.class_mixes(classes, owner)
        kept, rest = _without(owner, mix.odd)
        if mix.odd and class_skew(classes[kept], rest, torch.Generator().manual_seed(0)).counts:
            return replace(mix, odd=[])
        return mix

    def _differences(self, seen: Features, layers: Mapping[str, LayerFeatures]) -> Figures:
        """Measure how all clients differ; the rules get the same without the clients that stand out by themselves."""
        if (ways := regroupings([len(client) for client in self._clients], REGROUPINGS[1])) < REGROUPINGS[1]:
            sizes = f"{number_of(len(seen.owner), 'example')} can be dealt to {number_of(len(self._clients), 'client')}"
            self.lacking.append(
                f"differences between clients: {sizes} in {number_of(ways, 'way')}, too few for a test."
            )
        whole, skew, within = self._shifts(layers, seen.owner, seen.classes)
        if not math.isfinite(whole.excess):
            raise DataError("inputs of BatchNorm are not finite. Look for NaN and infinity in weights and inputs.")
        figures = {"shift": self._of_shift("shift", whole)}
        if skew is not None and within is not None:
            figures["class-skew"] = {"mean": skew.mean, **vars(skew)}
            figures["shift-within-classes"] = self._of_shift("shift-within-classes", within)
        m, apart = self._m, self._m.each.apart
        m.apart = [name for k, name in enumerate(m.names) if k in apart]
        m.rest = [name for k, name in enumerate(m.names) if k not in apart]
        if apart and len(m.rest) > 1:
            kept, owner = _without(seen.owner, apart)
            layers = {path: replace(f, first=f.first[kept], second=f.second[kept]) for path, f in layers.items()}
            whole, skew, within = self._shifts(layers, owner, None if seen.classes is None else seen.classes[kept])
        m.shift, m.skew, m.within = whole, skew, within
        return figures

    def _shifts(
        self, layers: Mapping[str, LayerFeatures], owner: Tensor, classes: Tensor | None
    ) -> tuple[Shift, ClassSkew | None, Shift | None]:
        eps = {path: self._layers[path].eps for path in layers}
        whole = shift(layers, owner, eps, self._generator)
        if classes is None:
            return whole, None, None
        skew = class_skew(classes, owner, self._generator)
        return whole, skew, shift(layers, owner, eps, self._generator, classes)

    def _of_shift(self, name: str, shift: Shift) -> Figures:
        for path, value in shift.layers.items():
            self._rows[path] |= {name: value, f"{name}-by-chance": shift.by_chance[path]}
        return {
            "excess": shift.excess,
            "p-value": shift.p_value,
            "share": shift.share,
            "peak": shift.excess_in(shift.worst),
            "peak-p-value": shift.peak_p_value,
        }

    def _gradients(self) -> Figures:
        chosen = [client for client in self._clients if len(client) > 1][:MAX_CLIENTS_B]
        if not any(parameter.requires_grad for parameter in self._model.parameters()):
            raise ConfigError("no parameter of the model is trainable.")
        if len(chosen) < 2:
            raise ConfigError("it needs two clients with two examples each.")
        most = examples_of_b(chosen, _BATCH_B)
        if any(min(len(client), client.batch_size) > most for client in chosen):
            self.notes.append(f"B_i: batches of {most} examples were used, fewer than in training, for their memory.")
        batches = [self._batch(client, most) for client in chosen]
        of_clients = deviations(self._model, batches, self._loss)
        mixed = [regrouped(batches, self._generator) for _ in range(_REGROUPED)]
        chance = []
        for groups in mixed:
            chance += [deviation.relative for deviation in deviations(self._model, groups, self._loss)]
        self._m.deviations, self._m.deviation_by_chance = of_clients, sum(chance) / len(chance)
        return {
            "gradient-deviation": {
                "clients": [client.name for client in chosen],
                "absolute": [deviation.absolute for deviation in of_clients],
                "relative": [deviation.relative for deviation in of_clients],
                "relative-by-chance": self._m.deviation_by_chance,
            }
        }

    def _batch(self, client: ClientData, most: int) -> Batch:
        """Return a random batch of a client, at least 2 examples."""
        count = min(len(client), max(2, client.batch_size), most)
        return client.batch(torch.randperm(len(client), generator=self._generator)[:count])

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

    def _small_gammas(self) -> Figures:
        """Measure what a gamma of the usual size would gain, in the layers where it is far smaller."""
        sizes = {
            path: float(layer.weight.detach().abs().median())
            for path, layer in self._layers.items()
            if layer.affine and path not in self._m.starting and not self._m.fresh
        }
        tried = {}
        for path, size in sizes.items():
            others = [other for name, other in sizes.items() if name != path]
            usual = statistics.median(others) if others else 1.0
            if 0 < size < LOW_GAMMA * usual:
                tried[path] = usual
        for path in sorted(tried, key=lambda path: sizes[path] / tried[path])[:MAX_LAYERS_TRIED]:
            plain, restored = copied(self._model).eval(), copied(self._model).eval()
            with torch.no_grad():
                layers_of(restored)[path].weight.mul_(tried[path] / sizes[path])
            gap = compared(plain, restored, self._tests, self._loss, self._generator)
            if harms(gap):
                self._m.weak[path] = sizes[path], tried[path], gap
        return {}

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
        "window-variance": [window_variance(batches) for batches in by_client],
        "batch-noise": [noise(batches, eps) for batches in by_client],
    }
