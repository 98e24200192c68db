"""Flower's own wrappers for differential privacy around a strategy of this package: which work, which are refused."""

from __future__ import annotations

import logging

from fedbn_flwr.batchnorm.parts import Parts
from fedbn_flwr.compat.flower import calling_dp_wrapper
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.server.methods import Methods
from fedbn_flwr.server.sent_beside import sent_beside

__all__ = ["check_wrapper"]

logger = logging.getLogger("flwr")

_INSTEAD = "fedbn_flwr.privacy.DPWrapper weighs all clients alike and knows the parts of the model"


def check_wrapper(methods: Methods, parts: Parts, warn: bool) -> None:
    """Check that Flower's wrapper, if it calls the strategy, does with this method what it says.

    ``warn``: warn of the weights of the clients, and of counters, which the wrapper treats as weights of the model.

    Raises:
        ConfigError: something of the clients bypasses the wrapper, or the wrapper would fail or break the methods.
    """
    wrapper = calling_dp_wrapper()
    if not wrapper:
        return
    reasons = [beside.text for beside in sent_beside(methods)]
    if methods.local and "ServerSide" in wrapper:
        reasons.append("it needs the whole model in each reply, and the clients keep a part of it")
    if methods.freezes_bn:
        reasons.append("it would add noise to frozen statistics")
    if reasons:
        raise ConfigError(f"{wrapper} around strategy {methods.name!r}: {'; '.join(reasons)}. {_INSTEAD}.")
    if not warn:
        return
    logger.warning(
        "%s expects that all clients weigh the same, and strategy %r weighs the clients by |D_i|, so that one of them "
        "can move the average by more than its noise is for: an epsilon from its noise multiplier alone would be too "
        "small. %s.",
        wrapper,
        methods.name,
        _INSTEAD,
    )
    if parts.counters:
        logger.warning(
            "%s clips and adds noise to BN's int64 counters and running statistics as if they were weights: the "
            "counters alone can take up the clipping norm, and variances can become negative. %s.",
            wrapper,
            _INSTEAD,
        )
