"""Every threshold of the doctor, with its reason. Where chance can be measured, a rule compares with chance instead."""

from __future__ import annotations

__all__ = [
    "CERTAIN",
    "DEAD_SHARE",
    "EXPLODING_VARIANCE",
    "GROUPS",
    "LARGE_LOSS",
    "LEVEL",
    "MIN_BELOW",
    "MIN_CENTRE",
    "MIN_CLIENTS",
    "MIN_EXAMPLES",
    "MIN_FACTOR",
    "MIN_GAP",
    "MIN_LOSS",
    "MIN_LOSS_ABOVE",
    "MIN_MIX",
    "MIN_NOISE",
    "MIN_PEAK",
    "MIN_SHARE_BELOW",
    "MIN_SHIFT",
    "MIN_SKEW",
    "MOMENTA",
    "NO_VARIANCE",
    "SMALL_BATCH",
    "TINY_GAMMA",
    "Z_OF_A_GAP",
]

CERTAIN = 1e-3
"""Largest p value of a difference between clients: with two tests a run, one healthy run in 500 would raise a false
alarm by chance, if there were no other condition."""

GROUPS = 256
"""Groups of examples that are compared, at most, but one a client: each is a pass."""

MIN_SKEW = 0.1
"""Total variation of the class mix above chance from which classes count as skewed: a tenth of the labels moved."""

MIN_SHIFT = 0.15
"""Deviation of a client's statistics, above chance, from which BatchNorm is affected, in standard deviations.

A shift by d standard deviations moves each normalised value by d. Measured on digits with label skew and E = 1: at 0.10
(lenet) FedTAN and GroupNorm gain 0.6 points of accuracy, at 0.40 (mlp of three layers) FedTAN gains 20.
"""

MIN_PEAK = 0.3
"""The same in one layer alone, where the mean over the layers is lower: twice as much.

In the second layer of lenet it is 0.16 under label skew, and FedTAN and GroupNorm gain only 0.6 points there.
"""

SMALL_BATCH = 4
"""Largest batch that counts as small: BatchNorm's error rises below 16, sharply at 4 and 2 (Wu & He 2018, Fig. 1)."""

MIN_NOISE = 0.1
"""Noise of a batch's mean, in standard deviations, from which 3 or 4 examples are too few; 1 and 2 always are.

Large images have many values per channel: with a lower noise their small batches pass.
"""

TINY_GAMMA = 1e-4
"""Largest abs(gamma) that counts as 0: the channel's output is beta, whatever the input; gamma starts at 1."""

MOMENTA = (0.3, 0.5)
"""Below the first, a larger momentum follows the weights faster; from the second, the last batches decide."""

DEAD_SHARE = 0.5
"""Share of a layer's channels with constant output from which the layer is dead; some dead channels are usual."""

MIN_EXAMPLES = 16
"""Examples from which a constant output says something of a layer: one example is always the same as itself."""

NO_VARIANCE = 1e-5
"""A running variance below it, and below eps, is near zero: torch's eps. A larger eps is usual, 1e-3 in MobileNetV3."""

EXPLODING_VARIANCE = 1e8
"""A running variance above it: activations of 10,000, which float16 squares to infinity."""

MIN_GAP = 0.05
"""Accuracy that running statistics lose against those of the test batch, from which a mismatch counts."""

MIN_LOSS = 0.25
"""The same of the loss, where it has no accuracy, as a share of the loss under those of the test batch."""

LARGE_LOSS = (2.0, 1.0)
"""The same of the loss beside an accuracy, as such a share, and in units of the loss: nats of cross-entropy."""

Z_OF_A_GAP = 4.0
"""Number of standard errors, over the test examples, that the loss loses as well; for accuracy its own are enough."""

LEVEL = 1 / 500
"""Share of the federations of equal clients in which chance makes any client stand out in any measure, at most."""

MIN_CLIENTS = 4
"""Clients from which one can stand out: of three, two agree by chance too often."""

MIN_FACTOR = 2.0
"""Factor between the spread of a client's inputs and the usual one from which the unit may be another."""

MIN_CENTRE = 1.0
"""Distance of the centre of a client's inputs from the usual one, in usual spreads, from which the unit may be."""

MIN_MIX = 0.25
"""Total variation of a client's class mix from the usual one: a quarter of its examples would have another class."""

MIN_BELOW = 0.2
"""Accuracy that a client is below the one of its classes elsewhere, from which it is far below the others.

Another class mix alone costs some, beyond chance: of 200 healthy federations of the digits up to 0.15.
"""

MIN_SHARE_BELOW = 0.5
"""Overlap of the clients' classes below which a client's accuracy cannot be compared: few others have its classes."""

MIN_LOSS_ABOVE = 1.0
"""The same of the loss, where there is no accuracy, as a share of the usual loss: twice as large."""
