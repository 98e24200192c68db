"""Repeatable random draws for the app's own function, but not for mods.

The server has the run's seed, and could subtract noise that depends on it, such as the
noise of Flower's ``LocalDpMod``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from flwr.app import Context, Message, MessageType
from flwr.clientapp.typing import ClientAppCallable

from fedbn_flwr.compat.flower import Mod, later_mods, with_mods
from fedbn_flwr.errors import (
    MOD_ON_QUERIES,
    MOD_RAISED,
    ClientPartError,
    FedBNError,
    coded,
)
from fedbn_flwr.messages.protocol import merged_config, message_seed
from fedbn_flwr.training.randomness import seed_generators, seed_secretly


def repeatable(mod: Mod) -> Mod:
    """Return ``mod`` as a mod that seeds the random draws of the app's function.

    It seeds the default generators of torch, NumPy and Python with the seed of the
    message (``message_seed``), so that the draws of the function repeat, and are equal
    in every engine. All other mods draw from the operating system's entropy: the mods
    between this mod and the function, and after the answer the mods before this mod.
    """

    @functools.wraps(mod)
    def seeded_mod(
        message: Message, context: Context, call_next: ClientAppCallable
    ) -> Message:
        seed = message_seed(message, context)
        # Flower passes the later mods and the app's function as one function. Take it
        # apart, so that the seed can be set between the last mod and the app's
        # function.
        mods, function = later_mods(call_next)
        of_function: list[Exception] = []

        def seeded(message: Message, context: Context) -> Message:
            seed_generators(seed)
            try:
                return function(message, context)
            except Exception as error:
                of_function.append(error)
                raise
            finally:
                seed_secretly()

        if mods:  # they draw before the function: give them a secret seed
            seed_secretly()
        if message.metadata.message_type.startswith(MessageType.QUERY):
            mods = [_named(later, of_function) for later in mods]
        return mod(message, context, with_mods(seeded, mods))

    return seeded_mod


def _named(mod: Mod, of_function: Sequence[Exception]) -> Mod:
    """Return the mod, but replace its exceptions by an error about the mod.

    The error names the mod and the remedy. Exceptions of this package, and exceptions
    that the app's function raised (``of_function``), stay as they are.
    """

    @functools.wraps(mod)
    def named(
        message: Message, context: Context, call_next: ClientAppCallable
    ) -> Message:
        kind, keys = message.metadata.message_type, sorted(merged_config(message))
        try:
            return mod(message, context, call_next)
        except Exception as error:
            if error in of_function or isinstance(error, FedBNError):
                raise
            text = (
                f"the mod {getattr(mod, '__name__', type(mod).__name__)!r} of the app"
                f" raised {type(error).__name__}: {error}, on a message of type"
                f" {kind!r} whose config has {', '.join(keys) or 'no entry'}."
                f" {MOD_ON_QUERIES}"
            )
            raise ClientPartError(coded(MOD_RAISED, text)) from error

    return named
