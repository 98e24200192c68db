"""Settings as text: comma strings, numbers, and when the learning rate decays."""

from __future__ import annotations

from contextlib import suppress

from fedbn_flwr.errors import ConfigError

__all__ = ["number", "read_decays", "split"]


def split(text: str) -> list[str]:
    """Return the entries of a comma string, stripped, without empty ones."""
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def number(text: str) -> int | float | None:
    """Return the whole or decimal number that a text is; None for another text."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return None


def read_decays(at: str, factor: str) -> list[tuple[str, float]]:
    """Return when the learning rate decays, as it is written, each with its factor.

    Args:
        at: ``lr-decay-at``.
        factor: ``lr-decay-factor``.

    Raises:
        ConfigError: an entry is neither a round, a fraction of the rounds nor "freeze",
            or the factors do not fit.
    """
    # when: each entry is a round, a share of the rounds or "freeze"
    entries = split(at)
    for entry in entries:
        value = number(entry)
        is_round = isinstance(value, int) and value >= 0
        is_fraction = isinstance(value, float) and 0 <= value <= 1
        if not (entry == "freeze" or is_round or is_fraction):
            raise ConfigError(
                f"lr-decay-at: {entry!r} is not a round (int), a fraction in [0, 1] or"
                " 'freeze'"
            )

    # by how much: one factor for all, or one for each; what is no number counts as 0
    factors = [float(number(text) or 0) for text in split(factor)]
    positive = all(one > 0 for one in factors)
    if not positive or len(factors) not in (1, len(entries)):
        raise ConfigError(
            f"lr-decay-factor={factor!r} must be one number above 0, or one for each of"
            f" the {len(entries)} entries of lr-decay-at"
        )
    if len(factors) == 1:
        factors *= len(entries)
    return list(zip(entries, factors, strict=True))
