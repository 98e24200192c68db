"""What differential privacy and masked sums do not cover in a run, and settings that do not fit them."""

from __future__ import annotations

from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.lab.config.table import CENTRALIZED
from fedbn_flwr.lab.config.texts import wrong
from fedbn_flwr.lab.config.values import Values
from fedbn_flwr.lab.data import decided_by_records, is_own
from fedbn_flwr.privacy.differential import beside_models
from fedbn_flwr.privacy.masked_sums import refusals
from fedbn_flwr.privacy.record_server import kept_between_rounds
from fedbn_flwr.privacy.settings import TWO_NOISES, dp_conflicts, mask_conflicts
from fedbn_flwr.strategies.fixbn import freeze_plan, freeze_round

__all__ = ["dp_problems", "mask_problems"]


def dp_problems(config: Values) -> list[str]:
    """Return what of this run bypasses the noise, or does not fit it."""
    asked = f"dp={config.dp}" if config.dp != "off" else "record-dp=true"
    if config.strategy == CENTRALIZED:
        return [f"{asked}: strategy=centralized has no clients"]
    problems = dp_conflicts(config.dp_settings())
    beside = beside_models(config.methods())
    problems += [f"strategy {config.title!r} with {asked}: {what}" for what in beside]
    problems += wrong(
        (
            config.dp != "off" and config.min_replies > 1,
            f"min-replies={config.min_replies}: a round with noise has a result whoever answers; leave it out",
        ),
        (
            config.early_stopping,
            f"early-stopping={config.early_stopping} chooses a round by the clients' validation examples",
        ),
    )
    problems += _uncovered(config, "dp-metrics", "epsilon does") + _of_inputs(config)
    decided = decided_by_records(config.own_data(), config.data_info()) if is_own(config.dataset) else {}
    for what, way in decided.items():
        problems.append(f"{asked}: the records decide {what}, which epsilon does not cover: {way}")
    return problems + (_record_problems(config) if config.record_dp else [])


def mask_problems(config: Values) -> list[str]:
    """Return what of this run is no sum over the clients."""
    if config.strategy == CENTRALIZED:
        return ["masked-sums=true: strategy=centralized has no clients"]
    problems = refusals(config.methods()) + mask_conflicts(config.dp_settings())
    one = "masked-sums=true needs at least 2 clients, and num-clients=1: a sum over one client is its update"
    problems += wrong((config.num_clients == 1, one)) + _uncovered(config, "masked-metrics", "masks do")
    return problems + (_of_inputs(config) if config.dp == "off" else [])


def _of_inputs(config: Values) -> list[str]:
    """Return what the sums of the inputs lack for ``standardise=federated`` under a protection."""
    if config.standardise_as() != "federated":
        return []
    noisy = config.record_dp or config.dp != "off"
    ways = "standardise=ranges or local" if not config.record_dp else "standardise=ranges"
    return wrong(
        (
            not config.data_info().input_shape,
            "standardise=federated of images has no sums that a protection covers: leave standardise out, for the "
            "constants of the data set",
        ),
        (
            not config.feature_ranges,
            "standardise=federated with privacy needs feature-ranges: bounded values can be masked, and noise covers "
            f"them. State the ranges (age:0:120,...), or use {ways}, which needs no sums",
        ),
        (
            noisy and not config.standardise_noise_multiplier,
            "standardise=federated with differential privacy needs standardise-noise-multiplier: without noise no "
            f"epsilon covers the sums. Set it, or use {ways}",
        ),
    )


def _uncovered(config: Values, metrics: str, protects: str) -> list[str]:
    """Return what tells of the clients' data beside their updates; the setting ``metrics`` may publish some."""
    withheld = getattr(config, metrics.replace("-", "_")) == "withheld"
    told = ",".join(n for n in config.evaluations() if n.startswith("personal") or n == "global-train")
    of_clients = {
        f"eval-on={told}": told,
        "validation-share": config.validation_share,
        "held-out-clients": config.held_out_clients,
    }
    tell = f"reports results on the clients' data, which {protects} not cover: leave it out, or set {metrics}=published"
    return wrong(
        (
            config.norm == "batch-renorm" and (config.dp != "off" or config.masked_sums),
            "norm=batch-renorm warms up by counting batches, and with privacy a counter counts rounds",
        ),
        *((withheld and asked, f"{key} {tell}") for key, asked in of_clients.items()),
    )


def _record_problems(config: Values) -> list[str]:
    """Return what does not fit DP-SGD in the clients."""
    target, limit, noise = config.record_dp_target_epsilon, config.dp_max_epsilon, config.record_dp_noise_multiplier
    problems = wrong(
        (
            config.masked_sums,
            "record-dp=true with masked-sums=true: the two are not counted together; choose one of them",
        ),
        (not config.local_steps, "record-dp=true counts steps: set local-steps, not local-epochs"),
        (
            target and noise,
            f"record-dp-target-epsilon={target} chooses the noise; leave record-dp-noise-multiplier={noise} out",
        ),
        (
            limit and not (target or noise),
            f"dp-max-epsilon={limit} needs record-dp-noise-multiplier or record-dp-target-epsilon",
        ),
        (limit and limit < target, f"dp-max-epsilon={limit} is below record-dp-target-epsilon={target}"),
        (
            config.standardise_as() == "local",
            "record-dp=true: standardise=local brings the mean and std of the training examples into the model, "
            "without noise. Use standardise=ranges with feature-ranges, federated with noise, or none",
        ),
        (
            config.series and kept_between_rounds(config.methods()),
            f"record-dp=true with series={config.series}: what clients kept in earlier runs may have had no noise. "
            "Leave series out",
        ),
    )
    return problems + _freezing_problems(config)


def _freezing_problems(config: Values) -> list[str]:
    """Return why T* of FixBN does not fit DP-SGD, which begins there, alone or after client-level noise."""
    freezes, after = "", None  # after which round BN's statistics are frozen, and the setting that says so
    if plan := freeze_plan(config.methods()):
        key, at, parts = plan
        freezes = "freeze-statistics=false"
        if Part.STATISTICS in parts:
            freezes, after = f"{key}={at}", freeze_round(at, config.num_server_rounds)
    if config.dp == "off":
        return wrong(
            (
                freezes and after != 0,
                f"record-dp=true: with {freezes} BN normalises with whole batches before it is frozen, which no noise "
                "protects. Use strategy=fixbn with freeze-at=0, and init= for weights and statistics of public data; "
                "or protect these rounds by client-level noise (dp=server)",
            )
        )
    both = f"record-dp=true with dp={config.dp}"
    if not after:
        return [
            f"{both}: choose one of them. Both are for FixBN with T* above 0, where dp protects the rounds up to T*"
        ]
    return wrong(
        (
            after >= config.num_server_rounds,
            f"{both}: with {freezes} BN is never frozen, so there is no DP-SGD",
        ),
        *((True, f"{both}: {what}") for what in kept_between_rounds(config.methods())),
        (
            config.dp_target_epsilon,
            f"{both}: dp-target-epsilon={config.dp_target_epsilon} is for clients, and epsilon is that of an example "
            "here",
        ),
        (
            config.record_dp_target_epsilon,
            f"{both}: record-dp-target-epsilon={config.record_dp_target_epsilon} {TWO_NOISES}",
        ),
        (
            config.dp_neighbours != "zero-out" or config.dp_sampling != "known",
            f"{both}: dp-neighbours={config.dp_neighbours} and dp-sampling={config.dp_sampling} have no meaning for an "
            "example; leave them out",
        ),
    )
