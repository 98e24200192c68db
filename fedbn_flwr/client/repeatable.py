"""Which part of a client's work repeats: what the app's own function draws, and nothing that a mod draws.

The server knows the run's seed. Noise that followed it, as that of Flower's ``LocalDpMod``, could be subtracted again.
"""

from __future__ import annotations

import functools

from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable, Mod

from fedbn_flwr.compat.flower import later_mods, with_mods
from fedbn_flwr.messages.protocol import message_seed
from fedbn_flwr.training.randomness import seed_generators, seed_secretly

__all__ = ["repeatable"]


def repeatable(mod: Mod) -> Mod:
    """Return ``mod`` as one that seeds the default generators of torch, NumPy and Python for the app's function alone.

    The seed is that of the message (``message_seed``): what the function draws repeats, and is the same in every
    engine. Mods between this one and the function, and those before it once it has answered, draw from the operating
    system's entropy.
    """

    @functools.wraps(mod)
    def seeded_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        seed = message_seed(message, context)
        mods, function = later_mods(call_next)

        def seeded(message: Message, context: Context) -> Message:
            seed_generators(seed)
            try:
                return function(message, context)
            finally:
                seed_secretly()

        if mods:
            seed_secretly()
        return mod(message, context, with_mods(seeded, mods))

    return seeded_mod
