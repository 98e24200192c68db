"""What differential privacy and masked sums do not cover in a run, and settings that do not fit them."""

from __future__ import annotations

from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.lab.config.fields import CENTRALIZED
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
    if config.dp != "off" and config.min_replies > 1:
        problems.append(
            f"min-replies={config.min_replies}: a round with noise has a result whoever answers; leave it out"
        )
    if config.early_stopping:
        problems.append(f"early-stopping={config.early_stopping} chooses a round by the clients' validation examples")
    problems += _uncovered(config, "dp-metrics", "epsilon does")
    decided = decided_by_records(config.own_data(), config.data_info()) if is_own(config.dataset) else {}
    for what, way in decided.items():
        problems.append(f"{asked}: the records decide {what}, which epsilon does not cover: {way}")
    if config.record_dp:
        problems += _record_problems(config)
    return problems


def mask_problems(config: Values) -> list[str]:
    """Return what of this run is no sum over the clients."""
    if config.strategy == CENTRALIZED:
        return ["masked-sums=true: strategy=centralized has no clients"]
    problems = refusals(config.methods()) + mask_conflicts(config.dp_settings())
    if config.num_clients == 1:
        problems.append(
            "masked-sums=true needs at least 2 clients, and num-clients=1: a sum over one client is its update"
        )
    return problems + _uncovered(config, "masked-metrics", "masks do")


def _uncovered(config: Values, metrics: str, protects: str) -> list[str]:
    """Return what tells of the clients' data beside their updates; the setting ``metrics`` may publish some."""
    problems = []
    if config.norm == "batch-renorm" and (config.dp != "off" or config.masked_sums):
        problems.append("norm=batch-renorm warms up by counting batches, and with privacy a counter counts rounds")
    if config.standardise_as() == "federated" and not config.record_dp:
        problems.append(
            f"standardise=federated collects sums of the clients' inputs, which {protects} not cover: use "
            "standardise=local or none"
        )
    if getattr(config, metrics.replace("-", "_")) != "withheld":
        return problems
    personal = [name for name in config.evaluations() if name.startswith("personal")]
    of_clients = [
        (f"eval-on={','.join(personal)}", personal),
        ("validation-share", config.validation_share),
        ("held-out-clients", config.held_out_clients),
    ]
    for key, asked in of_clients:
        if asked:
            problems.append(
                f"{key} reports results on the clients' data, which {protects} not cover: leave it out, or set "
                f"{metrics}=published"
            )
    return problems


def _record_problems(config: Values) -> list[str]:
    """Return what does not fit DP-SGD in the clients."""
    problems = []
    if config.masked_sums:
        problems.append("record-dp=true with masked-sums=true: the two are not counted together; choose one of them")
    if not config.local_steps:
        problems.append("record-dp=true counts steps: set local-steps, not local-epochs")
    target, limit, noise = config.record_dp_target_epsilon, config.dp_max_epsilon, config.record_dp_noise_multiplier
    if target and noise:
        problems.append(
            f"record-dp-target-epsilon={target} chooses the noise; leave record-dp-noise-multiplier={noise} out"
        )
    if limit and not (target or noise):
        problems.append(f"dp-max-epsilon={limit} needs record-dp-noise-multiplier or record-dp-target-epsilon")
    if limit and limit < target:
        problems.append(f"dp-max-epsilon={limit} is below record-dp-target-epsilon={target}")
    if config.compile:
        problems.append("record-dp=true computes the gradient of each example, and compile=true has no effect there")
    if config.standardise_as() != "none":
        problems.append(
            f"record-dp=true: standardise={config.standardise_as()} brings the mean and std of the training examples "
            "into the model, without noise. Use standardise=none with features of a known range"
        )
    if config.series and kept_between_rounds(config.methods()):
        problems.append(
            f"record-dp=true with series={config.series}: what clients kept in earlier runs may have had no noise. "
            "Leave series out"
        )
    return problems + (_freezing_problems(config) if config.dp == "off" else _both_problems(config))


def _freeze_round(config: Values) -> tuple[str, int | None]:
    """Return T* and the setting that says so; "" without FixBN, None if BN's statistics have no fixed T*."""
    plan = freeze_plan(config.methods())
    if plan is None:
        return "", None
    key, at, parts = plan
    if Part.STATISTICS not in parts:
        return "freeze-statistics=false", None
    return f"{key}={at}", freeze_round(at, config.num_server_rounds)


def _freezing_problems(config: Values) -> list[str]:
    """Return why BN is not frozen from round 1, though the method freezes it."""
    setting, after = _freeze_round(config)
    if not setting or after == 0:
        return []
    return [
        f"record-dp=true: with {setting} BN normalises with whole batches before it is frozen, which no noise "
        "protects. Use strategy=fixbn with freeze-at=0, and init= for weights and statistics of public data; or "
        "protect these rounds by client-level noise (dp=server)"
    ]


def _both_problems(config: Values) -> list[str]:
    """Return why client-level noise before T* and DP-SGD after it do not make one guarantee."""
    both, (setting, after) = f"record-dp=true with dp={config.dp}", _freeze_round(config)
    if not after:
        return [
            f"{both}: choose one of them. Both are for FixBN with T* above 0, where dp protects the rounds up to T*"
        ]
    problems = []
    if after >= config.num_server_rounds:
        problems.append(f"{both}: with {setting} BN is never frozen, so there is no DP-SGD")
    problems += [f"{both}: {what}" for what in kept_between_rounds(config.methods())]
    if config.dp_target_epsilon:
        problems.append(
            f"{both}: dp-target-epsilon={config.dp_target_epsilon} is for clients, and epsilon is that of an example "
            "here"
        )
    if config.record_dp_target_epsilon:
        problems.append(f"{both}: record-dp-target-epsilon={config.record_dp_target_epsilon} {TWO_NOISES}")
    if config.dp_neighbours != "zero-out" or config.dp_sampling != "known":
        problems.append(
            f"{both}: dp-neighbours={config.dp_neighbours} and dp-sampling={config.dp_sampling} have no meaning for an "
            "example; leave them out"
        )
    return problems
