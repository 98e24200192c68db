"""What to try for each finding, in order, with the settings of this package."""

from __future__ import annotations

from fedbn_flwr.doctor.findings import Remedy
from fedbn_flwr.doctor.situations import FEDBN, FIXBN, GROUP

__all__ = [
    "CLIENTS_DIFFER",
    "CLIENT_BELOW",
    "CLIENT_INPUTS",
    "CLIENT_REPEATS",
    "COUNTERS",
    "DIVERGED",
    "EXTREME_INSIDE",
    "EXTREME_VARIANCE",
    "MISMATCH",
    "MISMATCH_OF_UNMOVED",
    "NAME_FILTER",
    "NOTHING_KEPT",
    "NO_RUNNING_STATISTICS",
    "TRAIN_MODE",
    "UNMOVED",
    "UNMOVED_BY_MOMENTUM",
    "UNUSABLE",
]

_RECALIBRATE = Remedy(
    "recalibrate=true",
    "statistics are re-estimated from the clients' data, under fixed weights, before"
    " each test",
)


CLIENTS_DIFFER = [
    Remedy(
        "strategy=fedbn",
        "if each client is tested with its own model: it keeps its BatchNorm layers",
    ),
    Remedy(
        "strategy=fixbn lr-decay-at=freeze",
        "if one model is for all: the global statistics are frozen halfway",
    ),
    GROUP,
]
_LOOK = Remedy(
    "look at the client's examples",
    "their units, the order of features or pixels, channels and device, what was done"
    " to them, and how it labels",
)
CLIENT_INPUTS = [_LOOK, FEDBN]
CLIENT_REPEATS = [
    Remedy(
        "drop the client's repeated examples",
        "averages weigh a client by its examples, and a batch of equal ones has too"
        " small a variance",
    ),
]
CLIENT_BELOW = [
    _LOOK,
    Remedy(
        "train without the client",
        "for comparison: the others gain where its examples do not fit theirs",
    ),
]
TRAIN_MODE = [
    Remedy(
        "model.eval()",
        "before every test (fedbn_flwr.training.evaluate does so); in a run"
        " eval-on=global",
    ),
    _RECALIBRATE,
]
NO_RUNNING_STATISTICS = [
    Remedy(
        "track_running_stats=True",
        "the layers then keep running statistics, and a test no longer sees its batch",
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
        "with the weights: parameters() leaves them out, state_dict() has them; and"
        " load nothing over them",
    ),
    _RECALIBRATE,
]
COUNTERS = [
    Remedy(
        "leave integer entries out of the average",
        "take the maximum of the counters, as every strategy of this package does"
        " (fedbn_flwr.to_legacy wraps one of Flower's own); repair this state with"
        " `state[name] = state[name].round().long()`",
    )
]
_FINITE_BEFORE = Remedy(
    "lower learning-rate",
    "where weights are NaN the training diverged: go back to a state before that",
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
        "finds the layers by type: keep the names in .affine, .statistics and .counters"
        " local; or use strategy=fedbn",
    )
]
NOTHING_KEPT = [
    Remedy(
        "fedbn_flwr.split_state(model)",
        "finds the layers by type: keep the names in .affine, .statistics and .counters"
        " local; or use strategy=fedbn. As it is, this FedBN is FedAvg",
    )
]
_SMALLER_STEPS = (
    Remedy(
        "learning-rate ten times lower",
        "activations that explode come from steps that are too large",
    ),
    Remedy("agc=0.1", "limits single steps"),
)
_SCALE = Remedy(
    "scale the inputs",
    "rows and signals to (x - mean) / std; drop features that are constant",
)
EXTREME_VARIANCE = [_SCALE, *_SMALLER_STEPS]
EXTREME_INSIDE = [_RECALIBRATE, *_SMALLER_STEPS, _SCALE]
