r"""Fixed-point numbers in the ring of integers modulo 2^64, for masked sums.

A client with weight $w_i$ sends $\mathrm{round}(w_i x_i 2^f)$ as int64, and additions
wrap around. Let $f = 62 - \lceil \log_2 (W R) \rceil$, with $W$ the sum of all weights
and $R$ the largest size of a value. Then no sum leaves the ring, and the mean of $m$
clients is exact except for the rounding of $m$ products:

$$\left| \hat{x} - \frac{\sum_i w_i x_i}{\sum_i w_i} \right| \le \frac{m \, 2^{-f-1}}{\sum_i w_i} + 2^{-51} \max_i
|x_i|$$

The second term is the rounding of float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedbn_flwr.batchnorm.averaging import Array
from fedbn_flwr.errors import NOT_FINITE, ConfigError, DataError, ReplyError, coded

VALUE_RANGE = 2.0**16
"""R, the largest size of a masked value. Updates are in units of their layer, see
``privacy.coordinates``.
"""


@dataclass(frozen=True)
class FixedPoint:
    """The fixed-point numbers of a round.

    Args:
        total_weight: W, the sum of the weights of all clients that may send.
        value_range: R, the largest size of a value.

    Raises:
        ConfigError: W R is too large to leave a digit after the point.
    """

    total_weight: float
    value_range: float = VALUE_RANGE

    def __post_init__(self) -> None:
        """Check that at least one bit is left for the fraction."""
        if self.fraction_bits < 1:
            raise ConfigError(
                f"masked sums of values up to {self.value_range:g} with weights of"
                f" {self.total_weight:g} in total need more than 62 bits. Use fewer"
                " clients or examples"
            )

    @property
    def fraction_bits(self) -> int:
        """The number f of binary digits after the point."""
        return 62 - math.ceil(math.log2(self.value_range * self.total_weight))

    def error(self, num_clients: int, total_weight: float) -> float:
        """Return the largest error of a mean, given the sum of its clients' weights.

        It does not include float64's rounding of the values.
        """
        return num_clients * 2.0 ** (-self.fraction_bits - 1) / total_weight

    def vector(self, values: Mapping[str, Array], weight: float) -> Array:
        """Return the weighted values in the order of names, as a vector of int64.

        Raises:
            DataError: a value is not finite or out of range; its entry is named.
        """
        sizes = [values[name].size for name in sorted(values)]
        integers = np.empty(sum(sizes), np.int64)
        factor, start = weight * 2.0**self.fraction_bits, 0
        for name, size in zip(sorted(values), sizes, strict=True):
            wide = values[name].reshape(-1).astype(np.float64)
            if size and not float(np.abs(wide).max()) <= self.value_range:
                if not np.isfinite(wide).all():
                    text = (
                        f"entry '{name}' contains a value that is not finite, so it"
                        " cannot be masked"
                    )
                    raise DataError(coded(NOT_FINITE, text))
                # Do not show the value, because the server reads this message.
                raise DataError(
                    f"entry '{name}' contains a value above {self.value_range:g}, the"
                    " largest size of a masked value. Use smaller steps, and scale the"
                    " inputs."
                )
            integers[start : start + size] = np.rint(wide * factor)
            start += size
        return integers

    def mean(self, total: Array, weight: float) -> Array:
        """Return the mean in float64, given the sums of the vectors and of the weights.

        Raises:
            ReplyError: the sum is larger than any sum of these clients, so it still
                contains a mask.
        """
        wide = total.astype(np.float64) * 2.0**-self.fraction_bits / weight
        if wide.size and float(np.abs(wide).max()) > self.value_range * (1 + 1e-9):
            raise ReplyError("the masks do not cancel: the sum is out of range")
        return wide


def split(vector: Array, like: Mapping[str, Array]) -> dict[str, Array]:
    """Return the pieces of a vector by name, with the names and shapes of ``like``."""
    names = sorted(like)
    ends = np.cumsum([like[name].size for name in names])
    pieces = zip(names, np.split(vector, ends[:-1]), strict=True)
    return {name: piece.reshape(like[name].shape) for name, piece in pieces}
