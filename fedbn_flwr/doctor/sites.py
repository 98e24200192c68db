"""The table of the clients, with label shares and the means of inputs.

Each client is compared with the other clients. The difference of its labels is the
total variation 1/2 sum_c abs(p_kc - q_kc) of its class shares p and the others' shares
q. Its inputs are the columns of a table, or else the channels of the first BatchNorm
layer that uses batches. In each column, the difference is

    d_k = sum_i (x_i - m_c(i)) / sum_c n_kc (1 - n_kc / n_c)

over the examples i of client k, with the mean m_c of all n_c examples of class c. It
compares the client with the others at equal classes, so other labels do not make a
difference in the inputs. With one class, it is the mean of the client minus the mean of
the others. The unit is the pooled deviation within the clients.

One rule decides which differences are beyond chance. All examples are dealt to the
clients again at random, in the same numbers, and in the same numbers of each class if
inputs are compared. Of a unit, such as a patient, the first example counts, because the
others are not independent of it. In each new deal, the largest difference of any client in any
column counts, in units of its own deviation over the deals. A client is named if its
difference is larger than in all but 1 % of the deals. Examples of one distribution are
exchangeable, so chance names a client in at most 1 % of such federations, whatever the
distribution. The client that differs most is named first and then left out, because it
moves the mean of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedbn_flwr.batchnorm.layer_inputs import watch_inputs
from fedbn_flwr.doctor.clients import ClientExamples, batch_length, classes_of
from fedbn_flwr.doctor.damage import damage
from fedbn_flwr.doctor.findings import listed
from fedbn_flwr.doctor.thresholds import BY_CHANCE, DEALS, MIN_SHIFT, MIN_SKEW
from fedbn_flwr.errors import DataError
from fedbn_flwr.norms.replaced_layers import shown_path
from fedbn_flwr.training.batches import inputs_for
from fedbn_flwr.training.borrowed import borrowed
from fedbn_flwr.training.freezing import layers_of

__all__ = ["Inputs", "SiteRow", "compare_sites", "inputs_of"]

LOOKS = ("brightness", "contrast", "colour", "sharpness")
"""The columns of images that a person can check."""
_NAMED = 5  # most clients that are named in turn
_SHOWN = 3  # most columns that a text shows of a client


@dataclass(frozen=True)
class SiteRow:
    """A row of the table. A named client is left out of the comparisons after it.

    Attributes:
        client: name of the client.
        examples: number of examples.
        shares: share of each class; {} if the targets are not classes.
        labels: difference of each share from the share at the other clients.
        inputs: difference of each column, in pooled deviations.
        other_labels: whether the labels differ beyond chance and by ``MIN_SKEW``.
        other_inputs: the columns that differ beyond chance and by ``MIN_SHIFT``, the
            largest difference first.
        left_out: the clients named before this client, for its labels and its inputs.
        damage: a sentence for each damage in its data, see ``doctor.damage``.
    """

    client: str
    examples: int
    shares: dict[int, float]
    labels: dict[int, float]
    inputs: dict[str, float]
    other_labels: bool
    other_inputs: Sequence[str]
    left_out: tuple[Sequence[str], Sequence[str]] = ((), ())
    damage: Sequence[str] = ()

    @property
    def label_difference(self) -> float:
        """The total variation between the class shares and the others' class shares."""
        return sum(map(abs, self.labels.values())) / 2

    @property
    def labels_in_words(self) -> str:
        """The class with the largest excess at this client, or "" without classes."""
        if not self.shares:
            return ""
        of_class = max(self.labels, key=self.labels.__getitem__)
        share = self.shares[of_class]
        others = share - self.labels[of_class]
        without = _without(self.left_out[0])
        return f"class {of_class}: {share:.2f} (other clients{without}: {others:z.2f})"

    @property
    def inputs_in_words(self) -> str:
        """The columns that differ, or else the column that differs most."""
        columns = self.other_inputs or [
            max(self.inputs, key=lambda one: abs(self.inputs[one]))
        ]
        shown = [f"{one} {self.inputs[one]:+z.2f}" for one in columns[:_SHOWN]]
        if len(columns) > _SHOWN:
            shown.append(f"{len(columns) - _SHOWN} more")
        without = _without(self.left_out[1])
        return ", ".join(shown) + (without and f"; other clients{without}")


def _without(names: Sequence[str]) -> str:
    return f" without {listed(names)}" if names else ""


class Inputs(NamedTuple):
    """The inputs that are compared.

    Attributes:
        columns: names of the columns.
        values: a row for each example, float64 (N, D).
        hidden: the part of the pooled variance that ``values`` do not show, (D,): the
            variance within an example, and the layer's eps.
    """

    columns: Sequence[str]
    values: Tensor
    hidden: Tensor


def inputs_of(
    model: nn.Module, clients: Sequence[ClientExamples], in_eval: Collection[str] = ()
) -> Inputs:
    """Return the columns of a table, or the input of the first BatchNorm layer.

    It is the first input in a pass in eval mode, or without BatchNorm the
    example itself. An example has the mean over its positions. Images have their looks
    as further columns, see ``looks_of``.

    Args:
        model: the model.
        clients: the examples.
        in_eval: layers to leave out, because they normalise by fixed statistics.

    Raises:
        DataError: the inputs are not finite.
        NormLayerError: a layer has its own forward pass.
    """
    first = clients[0].inputs
    if first.dim() == 2 and first.is_floating_point():
        values = torch.cat([client.inputs for client in clients]).double()
        columns = [f"column {j}" for j in range(values.shape[1])]
        if len(clients[0].columns) == len(columns):
            columns = [*clients[0].columns]
        return Inputs(columns, values, values.new_zeros(len(columns)))

    means, within, looks = [], [], list[Tensor]()
    with borrowed(model) as working, torch.no_grad():
        working.eval()
        prepared, layers = inputs_for(working), layers_of(working)
        seen: list[tuple[str, Tensor]] = []

        def note(path: str, x: Tensor) -> None:
            seen.append((path, x))

        watch_inputs({p: one for p, one in layers.items() if p not in in_eval}, note)
        for client in clients:
            for batch in torch.split(client.inputs, batch_length(clients)):
                seen.clear()
                # The model may change its inputs in place.
                x = prepared(batch.clone())
                looks += [looks_of(x).cpu()] if x.dim() == 4 else []
                if layers:
                    working(x)
                    path, x = seen[0]
                # A layer may get several rows of an example, such as its windows.
                rows = x.movedim(1, -1).reshape(len(batch), -1, x.shape[1])
                variance, mean = torch.var_mean(rows.double(), 1, correction=0)
                means.append(mean.cpu())
                within.append(variance.cpu())
    values = torch.cat(means)
    if not bool(values.isfinite().all()):
        raise DataError(
            "inputs of BatchNorm are not finite. Look for NaN and infinity in the"
            " weights and the inputs."
        )
    hidden, where = torch.cat(within).mean(0), "the inputs"
    if layers:
        hidden, where = hidden + layers[path].eps, f"layer {shown_path(path)}"
    columns = [f"channel {j} of {where}" for j in range(values.shape[1])]
    if looks:
        values = torch.cat([torch.cat(looks), values], 1)
        hidden = torch.cat([hidden.new_zeros(len(LOOKS)), hidden])
        columns = [*LOOKS, *columns]
    return Inputs(columns, values, hidden)


def looks_of(images: Tensor) -> Tensor:
    """Return the ``LOOKS`` of images (N, C, H, W), float64 (N, 4).

    They are the mean, the deviation over the pixels, the deviation over the channels,
    and the mean step between neighbours in units of the contrast.
    """
    pixels = images.double()
    contrast = pixels.flatten(2).std(2).mean(1)
    steps = sum(pixels.diff(dim=at).abs().mean((1, 2, 3)) for at in (2, 3))
    colour = pixels.std(1, correction=0).mean((1, 2))
    sharpness = (steps / contrast).nan_to_num(0.0, 0.0, 0.0)
    return torch.stack([pixels.mean((1, 2, 3)), contrast, colour, sharpness], 1)


def compare_sites(
    clients: Sequence[ClientExamples],
    inputs: Inputs,
    generator: torch.Generator,
    tests: Sequence[ClientExamples] = (),
) -> list[SiteRow]:
    """Return the table of the clients, a row for each.

    ``generator`` draws the deals. ``tests`` are the test examples, if there are any.
    """
    first = torch.cat([client.first_of_units for client in clients])
    sizes = torch.tensor([len(client) for client in clients])
    owner = torch.arange(len(sizes)).repeat_interleave(sizes)[first]
    sizes = torch.bincount(owner)
    known, names = classes_of(clients), list[int]()
    classes = torch.zeros_like(owner)
    if known is not None:
        found, classes = torch.unique(known[first], return_inverse=True)
        names = found.tolist()
    counts = functional.one_hot(classes).double()
    shares = _sums(counts, owner, len(sizes)) / sizes[:, None]

    def labels(rows: Tensor) -> _Comparison:
        together = torch.zeros_like(owner[rows])
        return _compared(counts[rows], None, owner[rows], together)

    def means(rows: Tensor) -> _Comparison:
        values = inputs.values[first][rows]
        return _compared(values, inputs.hidden, owner[rows], classes[rows])

    by_label, other_labels, before = _named(labels, owner, MIN_SKEW, generator)
    by_input, other_inputs, earlier = _named(means, owner, MIN_SHIFT, generator)
    table, width = [], len(names)
    damaged = damage(clients, inputs.columns, tests)
    for k, client in enumerate(clients):
        row = dict(zip(inputs.columns, by_input[k].tolist(), strict=True))
        odd = [inputs.columns[j] for j in other_inputs.get(k, ())]
        table.append(
            SiteRow(
                client.name,
                len(client),
                dict(zip(names, shares[k, :width].tolist(), strict=True)),
                dict(zip(names, by_label[k, :width].tolist(), strict=True)),
                row,
                k in other_labels,
                sorted(odd, key=lambda column: -abs(row[column])),
                (
                    [clients[j].name for j in before[k]],
                    [clients[j].name for j in earlier[k]],
                ),
                damaged[k],
            )
        )
    return table


class _Comparison(NamedTuple):
    """A comparison of some clients.

    Attributes:
        differences: differences of each client from the others, (K, M).
        sizes: the values that must be large in a named client, (K, M) or (K, 1).
        scores: returns the sizes in units of their deviation over the deals, given the
            client of each example.
        owner: the client of each example.
        classes: the classes within which examples are dealt.
    """

    differences: Tensor
    sizes: Tensor
    scores: Callable[[Tensor], Tensor]
    owner: Tensor
    classes: Tensor


def _compared(
    values: Tensor, hidden: Tensor | None, owner: Tensor, classes: Tensor
) -> _Comparison:
    """Compare the means of the clients at equal classes.

    Args:
        values: the inputs of the examples, or their labels, 1 for the own class.
        hidden: see ``Inputs``; None for labels.
        owner: the client of each example.
        classes: the class of each example; 0 for labels, which are dealt together.
    """
    sites, width = int(owner.max()) + 1, int(classes.max()) + 1
    cells = torch.bincount(owner * width + classes, minlength=sites * width)
    counts = cells.view(sites, width).double()
    of_class = counts.sum(0)
    left = _centred(values, classes)
    # Means of constant columns are rounded, so do not take the rounding for noise.
    left = left * (left.abs().amax(0) > 1e-9 * values.abs().amax(0))
    # The variance of a client's sum over the deals, which draw without replacement.
    free = counts * (1 - counts / of_class.clamp(min=1))
    by_class = _sums(left.square(), classes, width)
    variance = free @ (by_class / (of_class - 1).clamp(min=1)[:, None])
    free = free.sum(1, keepdim=True)
    apart = (_sums(left, owner, sites) / free).nan_to_num(0.0, 0.0, 0.0)

    deviation, sizes = free.sqrt(), apart.abs().sum(1, keepdim=True) / 2
    if hidden is not None:
        deviation = variance.sqrt()
        degrees = max(1, len(values) - int((counts.sum(1) > 0).sum()))
        pooled = _centred(values, owner).square().sum(0) / degrees + hidden
        # A column may be constant within every client, but not over all clients.
        constant = pooled <= 1e-18 * values.square().amax(0)
        pooled = torch.where(constant, values.var(0), pooled).sqrt()
        apart = (apart / pooled).nan_to_num(0.0, 0.0, 0.0)
        sizes = apart.abs()

    def scores(owner: Tensor) -> Tensor:
        sums = _sums(left, owner, sites).abs()
        if hidden is None:
            sums = sums.sum(1, keepdim=True)
        return (sums / deviation).nan_to_num(0.0, 0.0)

    return _Comparison(apart, sizes, scores, owner, classes)


def _named(
    compare: Callable[[Tensor], _Comparison],
    owner: Tensor,
    least: float,
    generator: torch.Generator,
) -> tuple[Tensor, dict[int, list[int]], dict[int, list[int]]]:
    """Return the differences (K, M), the columns of each client that is named, and the
    clients that each client was not compared with.

    Args:
        compare: compares the clients of some examples, given as a mask.
        owner: the client of each example.
        least: smallest size of a difference that is named.
        generator: draws the deals.
    """
    left = torch.ones(int(owner.max()) + 1, dtype=torch.bool)
    table, named = torch.empty(0), dict[int, list[int]]()
    without = dict[int, list[int]]()
    while True:
        one = compare(left[owner])
        scores = one.scores(one.owner)
        rows = left.nonzero().flatten()
        table = table if named else one.differences.clone()
        table[rows] = one.differences[rows]
        without |= {k: [*named] for k in rows.tolist()}
        far = scores * ((scores > _limit(one, generator)) & (one.sizes >= least))
        if len(named) == _NAMED or not far.any():
            return table, named, without
        # If two clients are left, they differ from each other.
        chosen = rows if len(rows) == 2 else far.amax(1).argmax()[None]
        for k in chosen.tolist():
            named[k] = far[k].nonzero().flatten().tolist()
            left[k] = False
        if not left.any():
            return table, named, without


def _limit(one: _Comparison, generator: torch.Generator) -> float:
    """Return the largest score that counts as chance."""
    order = torch.argsort(one.classes)
    dealt, largest = torch.empty_like(one.owner), []
    for _ in range(DEALS):
        draws = torch.rand(len(dealt), generator=generator, dtype=torch.float64)
        # The integers sort the examples by class, and the draws mix them within it.
        dealt[order] = one.owner[torch.argsort(one.classes + draws)]
        largest.append(float(one.scores(dealt).max()))
    # A deal that is equal to the data may differ from them in the last digits.
    return sorted(largest)[-int(BY_CHANCE * (DEALS + 1))] * (1 + 1e-9)


def _centred(values: Tensor, groups: Tensor) -> Tensor:
    """Return the values minus the mean of their group."""
    count = int(groups.max()) + 1
    sizes = torch.bincount(groups).clamp(min=1)[:, None]
    return values - (_sums(values, groups, count) / sizes)[groups]


def _sums(values: Tensor, groups: Tensor, count: int) -> Tensor:
    """Return the sum of each group's rows, (count, D)."""
    return values.new_zeros((count, values.shape[1])).index_add_(0, groups, values)
