"""The remedies for each finding, in order, with the settings of this package."""

from __future__ import annotations

from fedbn_flwr.doctor.findings import Remedy
from fedbn_flwr.doctor.situations import FIXBN, GROUP

_RECALIBRATE = Remedy(
    "recalibrate=true",
    "statistics are re-estimated from the clients' data, under fixed weights, before"
    " each test",
)


CLIENTS_DIFFER = [
    Remedy(
        "strategy=fedbn",
        "if each client is tested with its own model, in which it keeps BatchNorm",
    ),
    Remedy(
        "strategy=fixbn lr-decay-at=freeze",
        "if all clients share one model: the global statistics are frozen halfway",
    ),
    GROUP,
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
MISMATCH = [_RECALIBRATE, FIXBN]
MISMATCH_OF_UNMOVED = [_RECALIBRATE]
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
EXTREME_VARIANCE = [_SCALE, *_SMALLER_STEPS]
EXTREME_INSIDE = [_RECALIBRATE, *_SMALLER_STEPS, _SCALE]
