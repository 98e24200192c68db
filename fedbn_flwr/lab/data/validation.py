"""Sets a seeded part of some examples apart, such as validation examples."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.data.splits import Indices
from fedbn_flwr.training.randomness import numpy_generator


def split_off(
    indices: Indices,
    labels: Indices,
    share: float,
    seed: int,
    units: Indices | None = None,
) -> tuple[Indices, Indices]:
    """Return (rest, part): ``part`` has ``share`` of the examples and of each class.

    The size of the part is ``share`` of the examples, rounded half up. At least one
    example or unit stays in the rest. If there are units, each unit stays whole. The
    units are visited in a random order. A unit moves to the part if the part's numbers
    by class then come nearer to the wanted numbers (by the sum of the differences).
    Without units, the part has exactly the wanted numbers.

    Args:
        indices: the examples to split, int64 (n,), each once, in any order.
        labels: class of each example of the data set, int64 (N,).
        share: in [0, 1).
        seed: seed of the draw.
        units: unit of each example of the data set, int64 (N,), such as its patient;
            None if each example is its own unit.

    Returns:
        Two sorted int64 vectors.

    Raises:
        ConfigError: the share is not in [0, 1).
    """
    if not 0 <= share < 1:
        raise ConfigError(f"share={share} must be in [0, 1)")
    # Do not change the order of the draws (first the shares, then the examples, then
    # the units), because every recorded split depends on it.
    rng = numpy_generator(seed, "split-off")
    examples = np.sort(np.asarray(indices, np.int64))
    _, classes = np.unique(np.asarray(labels)[examples], return_inverse=True)
    wanted = _shares(np.bincount(classes), Fraction(str(share)), rng)
    order = rng.permutation(len(examples))
    if units is None:
        # Take the first examples of each class in a random order of all examples.
        chosen = np.zeros(len(examples), bool)
        for label, number in enumerate(wanted):
            chosen[order[classes[order] == label][:number]] = True
    else:
        # Count the examples of each unit by class. Then visit the units in random
        # order, and take a unit if it brings the counts nearer to the wanted counts.
        _, unit_of = np.unique(np.asarray(units)[examples], return_inverse=True)
        num_units = int(unit_of.max(initial=-1)) + 1
        counts = np.zeros((num_units, len(wanted)), np.int64)
        np.add.at(counts, (unit_of, classes), 1)
        left = wanted
        taken = np.zeros(num_units, bool)
        for unit in rng.permutation(num_units):
            nearer = np.abs(left - counts[unit]).sum() < np.abs(left).sum()
            if nearer and taken.sum() + 1 < num_units:
                taken[unit] = True
                left = left - counts[unit]
        chosen = taken[unit_of]
    return examples[~chosen], examples[chosen]


def _shares(counts: Indices, share: Fraction, rng: np.random.Generator) -> Indices:
    """Return the number of examples of each class for the part.

    The largest remainders are rounded up. Ties are random.
    """
    # Compute with fractions, because floats do not represent a share such as 0.1
    # exactly, so equal remainders would become unequal.
    total = int(counts.sum())
    size = max(0, min(math.floor(share * total + Fraction(1, 2)), total - 1))
    exact = [share * int(count) for count in counts]
    numbers = np.array([math.floor(number) for number in exact], np.int64)
    remainders = [float(number - math.floor(number)) for number in exact]
    # Order equal remainders at random. Otherwise the first classes would win every tie.
    ranking = rng.permutation(len(counts)).tolist()
    ranking.sort(key=lambda label: -remainders[label])
    missing = size - int(numbers.sum())
    numbers[ranking[: max(missing, 0)]] += 1
    return numbers
