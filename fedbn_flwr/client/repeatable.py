"""Repeatable random draws for the app's own function, but not for mods.

The server has the run's seed, and could subtract noise that depends on it, such as the
noise of Flower's ``LocalDpMod``.
"""

from __future__ import annotations

import functools

from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable

from fedbn_flwr.compat.flower import Mod, later_mods, with_mods
from fedbn_flwr.messages.protocol import message_seed
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

        def seeded(message: Message, context: Context) -> Message:
            seed_generators(seed)
            try:
                return function(message, context)
            finally:
                seed_secretly()

        if mods:  # they draw before the function: give them a secret seed
            seed_secretly()
        return mod(message, context, with_mods(seeded, mods))

    return seeded_mod
