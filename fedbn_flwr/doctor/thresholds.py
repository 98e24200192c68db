"""All thresholds of the doctor, with their reasons.

If chance can be measured, a rule compares with chance instead.
"""

from __future__ import annotations

__all__ = [
    "BY_CHANCE",
    "CONSTANT",
    "COPIES",
    "DEALS",
    "EXPLODING_VARIANCE",
    "EXTREME_SHARE",
    "FEW_ROWS",
    "FEW_STEPS",
    "KINDS",
    "LARGE_LOSS",
    "MIN_GAP",
    "MIN_LOSS",
    "MIN_NOISE",
    "MIN_SHIFT",
    "MIN_SKEW",
    "NO_VARIANCE",
    "OTHER_ORDER",
    "SMALL_BATCH",
    "TARGET",
    "UNSCALED",
    "VARIES",
    "Z_OF_A_GAP",
    "Z_OF_COPIES",
    "Z_OF_REVERSE",
]

BY_CHANCE = 0.01
"""Share of the federations with equal clients in which chance names a client. The
labels and the inputs are two comparisons, so both together have 2 %.
"""

DEALS = 199
"""Number of times that the examples are dealt to the clients again."""

MIN_SKEW = 0.1
"""Total variation of a client's class shares from which its labels are named.

At 0.1, a tenth of the labels is moved.
"""

MIN_SHIFT = 0.15
"""Difference of a client's mean from which its inputs are named, in standard
deviations.

A shift by d standard deviations moves each normalised value by d. On digits with label
skew and E = 1, FedTAN and GroupNorm gain 0.6 points of accuracy at 0.10 (lenet), and
FedTAN gains 20 points at 0.40 (mlp of three layers).
"""

FEW_STEPS = 50
"""Local steps a round that are no longer few; it lies between the measured 20 and 100.
"""

SMALL_BATCH = 4
"""Largest batch that counts as small. BatchNorm's error rises below 16, and sharply at
4 and 2 (Wu & He 2018, Fig. 1).
"""

MIN_NOISE = 0.1
"""Noise of a batch's mean, in standard deviations, from which batches of 3 or 4 are too
small. Batches of 1 and 2 always are.

Large images have many values per channel, so their small batches are less noisy and
pass.
"""

NO_VARIANCE = 1e-5
"""Running variance that counts as near zero, if it is also below eps; torch's eps.

Larger values of eps are normal, such as 1e-3 in MobileNetV3.
"""

EXTREME_SHARE = 0.5
"""Share of channels with a variance near zero from which a layer is reported. A few such
channels are normal.
"""

EXPLODING_VARIANCE = 1e8
"""Running variance above which activations explode: at activations of 10,000, squares
are infinite in float16.
"""

MIN_GAP = 0.05
"""Loss in accuracy from which a mismatch counts, of running statistics compared with
the statistics of the test batch.
"""

MIN_LOSS = 0.25
"""Increase of the loss from which a mismatch counts if there is no accuracy, as a share
of the loss under the statistics of the test batch.
"""

LARGE_LOSS = (2.0, 1.0)
"""Increase of the loss from which a mismatch counts if there is an accuracy: as a share
as above, and in units of the loss (nats of cross-entropy).
"""

Z_OF_A_GAP = 4.0
"""Smallest z of a mismatch that is reported: the increase of the loss, or the decrease
of the accuracy, in standard errors over the test examples.
"""

COPIES = 0.05
"""Share of a client's examples that are at another client, or twice at this client, from
which they are named.
"""

TRAINED_TESTS = 0.1
"""Share of a client's test examples above which equal training examples are named."""

Z_OF_COPIES = 4.0
"""Smallest z of examples that are at two clients."""

Z_OF_REVERSE = 2.5
"""Smallest z of a reverse relation between the columns and the classes."""

FEW_ROWS = 50
"""Fewest rows of a table whose values and correlations are compared."""

CONSTANT, VARIES = 0.99, 0.9
"""A column is constant at a client, and varies at the others, if one value has a share
from the first and below the second limit.
"""

UNSCALED = 10.0
"""Root mean square of a column from which it is not scaled. Scaled columns have 1."""

TARGET = 0.99
"""Share of the variance of a column between the classes from which it is the target."""

KINDS = (5, 15)
"""Numbers of different values of a column of codes (at most) and of numbers (more)."""

OTHER_ORDER = 1 / 3
"""Slope of the correlations below which columns have another order. On UCI heart disease,
it is 0.43 to 1.1 at the four hospitals, and 0.3 or less with reversed columns.
"""
