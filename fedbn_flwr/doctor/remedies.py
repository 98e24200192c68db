"""The remedies for each finding, in order, with the settings of this package.

``docs/choose.md`` has the measured gain and the cost of the first remedies.
"""

from __future__ import annotations

from fedbn_flwr.doctor.findings import Remedy

_FEDBN = Remedy(
    "strategy=fedbn",
    "each client keeps its BatchNorm layers (statistics, gamma and beta), and the rest"
    " is averaged (arXiv:2102.07623)",
)
_FIXBN = Remedy(
    "strategy=fixbn lr-decay-at=freeze",
    "freezes the global statistics halfway (freeze-at=0.5) and continues training with"
    " them, at a lower learning rate (arXiv:2303.06530); no further messages",
)
_FEDWON = Remedy(
    "strategy=fedwon norm=wsconv",
    "convolutions with standardised weights and without BatchNorm (arXiv:2306.05879)",
)
_GROUP = Remedy(
    "norm=group",
    "GroupNorm does not use statistics of the batch. Without further changes it may"
    " reach less than BatchNorm",
)
_FEDTAN = Remedy(
    "strategy=fedtan",
    "BatchNorm uses the statistics of all clients' batches and the gradients through"
    " them (arXiv:2301.02982). A round has 3 L + 1 exchanges for L layers. With E = 1 a"
    " round equals one centralised step",
)
_FEDTAN2 = Remedy(
    "strategy=fedtan2",
    "FedTAN at first, then frozen statistics: most of FedTAN's gain, with few rounds of"
    " many exchanges",
)
_WEIGHTS = Remedy(
    "norm=group+ws",
    "GroupNorm after convolutions with standardised weights: the best of the long runs"
    " with many steps",
)
_SILOBN = Remedy(
    "strategy=silobn",
    "each client keeps only its statistics; gamma and beta are shared",
)
_CALIBRATE = Remedy(
    'fedbn_flwr.calibrate(model, [inputs], "all").model',
    "for a finished run: measures the statistics of a site's model again, on the"
    " inputs of the site's own training data",
)
_RECALIBRATE = Remedy(
    "recalibrate=true",
    "statistics are re-estimated from the clients' data, under fixed weights, before"
    " each test; a client with a model of its own uses its own data",
)

DAMAGED_DATA = [
    Remedy("repair the data", "then train again: other findings may follow from it")
]
LABEL_SKEW = [_FIXBN, _FEDTAN2, _WEIGHTS, _GROUP]
LABEL_SKEW_FEW_STEPS = [_FEDTAN, _FEDTAN2, _FIXBN, _GROUP]
FEATURE_SHIFT = [_FEDBN, _SILOBN, _FEDWON]
SMALL_BATCHES = [
    Remedy(
        "batch-size=16",
        "or more: the noise of a batch's statistics falls as 1 / sqrt(batch size)",
    ),
    _GROUP,
    _FEDWON,
    _FIXBN,
]
TRAIN_MODE = [
    Remedy(
        "model.eval()",
        "before every test, as fedbn_flwr.training.evaluate does; in a run"
        " eval-on=global",
    ),
    _RECALIBRATE,
]
NO_RUNNING_STATISTICS = [
    Remedy(
        "track_running_stats=True",
        "the layers then keep running statistics, and tests no longer use the batch",
    ),
    Remedy(
        "strategy=staticbn",
        "trains without running statistics and re-estimates them before each test",
    ),
]
MISMATCH = [_RECALIBRATE, _CALIBRATE, _FIXBN]
MISMATCH_OF_UNMOVED = [_RECALIBRATE, _CALIBRATE]
UNMOVED_BY_MOMENTUM = [
    Remedy("bn-momentum=0.1", "with momentum 0 no batch moves the running statistics"),
    _RECALIBRATE,
]
UNMOVED = [
    Remedy(
        "send and average the running statistics",
        "send the buffers with the weights: parameters() leaves them out, state_dict()"
        " has them. Do not overwrite them when loading",
    ),
    _RECALIBRATE,
]
COUNTERS = [
    Remedy(
        "leave integer entries out of the average",
        "take the maximum of the counters, as every strategy of this package does"
        " (fedbn_flwr.to_legacy wraps a strategy of Flower). Repair this state with"
        " `state[name] = state[name].round().long()`",
    )
]
_FINITE_BEFORE = Remedy(
    "lower learning-rate",
    "if weights are NaN, the training diverged: return to an earlier state",
)
_NO_STEPS = Remedy(
    "keep running statistics out of the server's optimizer",
    "momentum or Adam steps on a running variance make it negative; strategy=fedavgm,"
    " fedadam and fedyogi of this package average them instead",
)
UNUSABLE = [_NO_STEPS, _RECALIBRATE, _FINITE_BEFORE]
DIVERGED = [_FINITE_BEFORE, Remedy("agc=0.1", "limits single steps"), _NO_STEPS]
NAME_FILTER = [
    Remedy(
        "fedbn_flwr.split_state(model)",
        "finds the layers by type. Keep the names in .affine, .statistics and .counters"
        " local, or use strategy=fedbn",
    )
]
NOTHING_KEPT = [
    Remedy(
        "fedbn_flwr.split_state(model)",
        "finds the layers by type. Keep the names in .affine, .statistics and .counters"
        " local, or use strategy=fedbn. Without local entries FedBN is FedAvg",
    )
]
_SMALLER_STEPS = (
    Remedy(
        "learning-rate ten times lower",
        "exploding activations are caused by steps that are too large",
    ),
    Remedy("agc=0.1", "limits single steps"),
)
_SCALE = Remedy(
    "scale the inputs",
    "rows and signals to (x - mean) / std; drop constant features",
)


def frozen_but_moving(trained: str) -> list[Remedy]:
    """Return the remedy for frozen layers whose statistics move.

    Args:
        trained: the words of ``train_only`` that select the parameters that train.
    """
    why = (
        "freezes the statistics, too. In Python, pass train_only to the strategy, or"
        " call fedbn_flwr.train_only(model, ...) in a loop of your own"
    )
    return [Remedy(f"train-only={trained}", why)]


EXTREME_VARIANCE = [_SCALE, *_SMALLER_STEPS]
EXTREME_INSIDE = [_RECALIBRATE, *_SMALLER_STEPS, _SCALE]
