"""Every threshold of the doctor, with its reason. Where chance can be measured, a rule
compares with chance instead.
"""

from __future__ import annotations

__all__ = [
    "CERTAIN",
    "EXPLODING_VARIANCE",
    "EXTREME_SHARE",
    "GROUPS",
    "LARGE_LOSS",
    "LEVEL",
    "MIN_BELOW",
    "MIN_CLIENTS",
    "MIN_GAP",
    "MIN_LOSS",
    "MIN_MIX",
    "MIN_NOISE",
    "MIN_REPEATED",
    "MIN_SHIFT",
    "MIN_SKEW",
    "NO_VARIANCE",
    "RE_SPLITS",
    "SMALL_BATCH",
    "Z_OF_A_GAP",
]

CERTAIN = 1e-3
"""Largest p value of a difference between clients: with two tests a run, one healthy
run in 500 would raise a false alarm by chance, if there were no other condition.
"""

GROUPS = 256
"""Groups of examples that are compared, at most, but one a client: each is a pass."""

MIN_SKEW = 0.1
"""Total variation of the class mix above chance from which classes count as skewed: a
tenth of the labels moved.
"""

MIN_SHIFT = 0.15
"""Deviation of a client's statistics, above chance, from which BatchNorm is affected,
in standard deviations.

A shift by d standard deviations moves each normalised value by d. Measured on digits
with label skew and E = 1: at 0.10 (lenet) FedTAN and GroupNorm gain 0.6 points of
accuracy, at 0.40 (mlp of three layers) FedTAN gains 20.
"""

SMALL_BATCH = 4
"""Largest batch that counts as small: BatchNorm's error rises below 16, sharply at 4
and 2 (Wu & He 2018, Fig. 1).
"""

MIN_NOISE = 0.1
"""Noise of a batch's mean, in standard deviations, from which 3 or 4 examples are too
few; 1 and 2 always are.

Large images have many values per channel: with a lower noise their small batches pass.
"""

NO_VARIANCE = 1e-5
"""A running variance below it, and below eps, is near zero: torch's eps. A larger eps
is usual, 1e-3 in MobileNetV3.
"""

EXTREME_SHARE = 0.5
"""Share of a layer's channels with a variance near zero from which it is a finding;
some such channels are usual.
"""

EXPLODING_VARIANCE = 1e8
"""A running variance above it: activations of 10,000, which float16 squares to
infinity.
"""

MIN_GAP = 0.05
"""Accuracy that running statistics lose against those of the test batch, from which a
mismatch counts.
"""

MIN_LOSS = 0.25
"""The same of the loss, where it has no accuracy, as a share of the loss under those of
the test batch.
"""

LARGE_LOSS = (2.0, 1.0)
"""The same of the loss beside an accuracy, as such a share, and in units of the loss:
nats of cross-entropy.
"""

Z_OF_A_GAP = 4.0
"""Number of standard errors, over the test examples, that the loss or the accuracy
loses.
"""

LEVEL = 1 / 500
"""Share of the federations of equal clients in which chance makes any client stand out
in any measure, at most.
"""

RE_SPLITS = 500
"""Random re-splits of the examples among the clients, all of whose clients are nearer
to the usual inputs than one that stands out: ``LEVEL``.
"""

MIN_CLIENTS = 4
"""Clients from which one can stand out: of three, two agree by chance too often."""

MIN_MIX = 0.25
"""Total variation of a client's class mix from the usual one: a quarter of its examples
would have another class.
"""

MIN_REPEATED = 0.2
"""Share of distinct examples that a client is below the median, from which its examples
count as repeated: a fifth would be another's equal.
"""

MIN_BELOW = 0.2
"""Accuracy that a client is below the median, from which it is far below the others.

Another class mix alone costs some, beyond chance: of 200 healthy federations of the
digits up to 0.15.
"""
