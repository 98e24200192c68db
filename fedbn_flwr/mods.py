"""The client half for other people's apps: ``from fedbn_flwr.mods import bn_mod``."""

from __future__ import annotations

from fedbn_flwr.client.answers import answer_query, answer_statistics
from fedbn_flwr.client.hooks import Hooks, bn_rules
from fedbn_flwr.client.masking import masked_update
from fedbn_flwr.client.mod import bn_mod
from fedbn_flwr.client.packed import packed
from fedbn_flwr.client.update_clipping import clipped_update

local_bn = bn_mod
"""The name that ``bn_mod`` had until 0.2."""

__all__ = [
    "Hooks",
    "answer_query",
    "answer_statistics",
    "bn_mod",
    "bn_rules",
    "clipped_update",
    "local_bn",
    "masked_update",
    "packed",
]
