"""The ranges of features in a config: ``age:0:120,*:-5:5``."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config.texts import number, split
from fedbn_flwr.training.input_scale import FeatureRanges

__all__ = ["parse_ranges"]

_ALL_OTHERS = "*"


def parse_ranges(text: str, names: Sequence[str]) -> FeatureRanges:
    """Return the range of each feature, in order.

    Args:
        text: comma list of NAME:LOW:HIGH; ``*`` names all features without an entry of their own.
        names: the features; a name may hold colons.

    Raises:
        ConfigError: all that is wrong, one line each.
    """
    known, problems = dict[str, tuple[float, float]](), []
    for entry in split(text):
        name, *ends = entry.rsplit(":", 2)
        low, high = (number(end) for end in ends) if len(ends) == 2 else (None, None)
        if low is None or high is None or not low < high or not math.isfinite(high - low):
            problems.append(
                f"feature-ranges: {entry!r} is no range. Write NAME:LOW:HIGH with LOW below HIGH, as age:0:120"
            )
        elif name not in (*names, _ALL_OTHERS):
            problems.append(f"feature-ranges: {name!r} is no feature. The data have {', '.join(names[:20])}")
        elif name in known:
            problems.append(f"feature-ranges: {name!r} has two ranges. Leave one out")
        else:
            known[name] = low, high
    absent = [name for name in names if name not in known and _ALL_OTHERS not in known]
    if absent and not problems:
        problems.append(
            f"feature-ranges: no range for {', '.join(absent[:20])}. Add them, or *:LOW:HIGH for all others"
        )
    if problems:
        raise ConfigError("\n".join(problems))
    ranges = [known[name] if name in known else known[_ALL_OTHERS] for name in names]
    return FeatureRanges(tuple(float(low) for low, _ in ranges), tuple(float(high) for _, high in ranges))
