"""What differential privacy and masked sums do not cover in a run, and settings that do not fit them."""

from __future__ import annotations

from fedbn_flwr.lab.config.table import CENTRALIZED
from fedbn_flwr.lab.config.texts import wrong
from fedbn_flwr.lab.config.values import Values
from fedbn_flwr.lab.data import is_own
from fedbn_flwr.privacy.differential import beside_models
from fedbn_flwr.privacy.masked_sums import refusals
from fedbn_flwr.privacy.settings import dp_conflicts, mask_conflicts

__all__ = ["dp_problems", "mask_problems"]


def dp_problems(config: Values) -> list[str]:
    """Return what of this run bypasses the noise, or does not fit it."""
    asked = f"dp={config.dp}"
    if config.strategy == CENTRALIZED:
        return [f"{asked}: strategy=centralized has no clients"]
    problems = dp_conflicts(config.dp_settings())
    beside = beside_models(config.methods())
    problems += [f"strategy {config.title!r} with {asked}: {what}" for what in beside]
    problems += wrong(
        (
            config.min_replies > 1,
            f"min-replies={config.min_replies}: a round with noise has a result whoever answers; leave it out",
        ),
        (
            config.early_stopping,
            f"early-stopping={config.early_stopping} chooses a round by the clients' validation examples",
        ),
    )
    problems += _uncovered(config, "epsilon does")
    counted = config.data_info().task.name in ("classification", "segmentation") and not config.num_classes
    if is_own(config.dataset) and counted:
        uncovered = "the data decide the number of classes, which epsilon does not cover"
        problems.append(f"{asked}: {uncovered}: set num-classes")
    return problems


def mask_problems(config: Values) -> list[str]:
    """Return what of this run is no sum over the clients."""
    if config.strategy == CENTRALIZED:
        return ["masked-sums=true: strategy=centralized has no clients"]
    problems = refusals(config.methods()) + mask_conflicts(config.dp_settings())
    one = "masked-sums=true needs at least 2 clients, and num-clients=1: a sum over one client is its update"
    problems += wrong((config.num_clients == 1, one)) + _uncovered(config, "masks do")
    return problems


def _uncovered(config: Values, protects: str) -> list[str]:
    """Return what tells of the clients' data beside their updates."""
    told = ",".join(n for n in config.evaluations() if n.startswith("personal") or n == "global-train")
    tells = f"reports results on the clients' data, which {protects} not cover"
    return wrong(
        (
            config.norm == "batch-renorm",
            "norm=batch-renorm warms up by counting batches, and with privacy a counter counts rounds",
        ),
        (told, f"eval-on={told} {tells}: use eval-on=global"),
        (config.validation_share, f"validation-share {tells}: leave it out"),
        (config.held_out_clients, f"held-out-clients {tells}: leave it out"),
    )
