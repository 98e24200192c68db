"""The first choice in each situation, with its measured gain and its cost.

This is the only table of advice. The doctor's remedies, the table of ``docs/choose.md``
and the reports use it. Its numbers come from ``docs/results/methods.yaml``, the file
with the commands and commits. A test compares them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedbn_flwr.doctor.findings import Remedy

_MANY = 50  # E from which local steps are many; it lies between the measured 20 and 100


@dataclass(frozen=True)
class StudyGain:
    """The gain of the first remedy in one study.

    Attributes:
        study: name of the study in ``docs/results/methods.yaml``.
        setting: the study in a few words.
        method: name of the remedy in the study.
        fedavg: test accuracy in per cent of FedAvg with the model's BatchNorm.
        accuracy: test accuracy in per cent of the remedy.
    """

    study: str
    setting: str
    method: str
    fedavg: str
    accuracy: str

    def __str__(self) -> str:
        """Return a text such as "36.39 -> 89.73 (CIFAR-10, ...)"."""
        return f"{self.fedavg} -> {self.accuracy} ({self.setting})"


@dataclass(frozen=True)
class Situation:
    """A situation that a user recognises, with its remedies.

    Attributes:
        seen: the situation in words.
        section: anchor of the section in ``docs/choose.md`` that explains it.
        tries: the remedies to try, in order.
        cost: cost of the first remedy.
        measured: gain of the first remedy by study; empty if it was not compared with
            FedAvg.
    """

    seen: str
    section: str
    tries: tuple[Remedy, ...]
    cost: str
    measured: tuple[StudyGain, ...] = ()

    @property
    def remedies(self) -> list[Remedy]:
        """The remedies to try, in order. The first one has its gain and cost."""
        expected = f"Cost: {self.cost}"
        if self.measured:
            gains = "; ".join(map(str, self.measured))
            expected = (
                f"Accuracy: FedAvg with BatchNorm -> this remedy: {gains}. {expected}"
            )
        first, *others = self.tries
        return [replace(first, expected=expected), *others]


FEDBN = Remedy(
    "strategy=fedbn",
    "each client keeps its BatchNorm layers (statistics, gamma and beta), and the rest"
    " is averaged (arXiv:2102.07623)",
)
FIXBN = Remedy(
    "strategy=fixbn lr-decay-at=freeze",
    "freezes the global statistics halfway (freeze-at=0.5) and continues training with"
    " them, at a lower learning rate (arXiv:2303.06530); no further messages",
)
FEDWON = Remedy(
    "strategy=fedwon norm=wsconv",
    "convolutions with standardised weights and without BatchNorm (arXiv:2306.05879)",
)
GROUP = Remedy(
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
    "fedbn-flwr calibrate RUN --dataset NEW --out DIR",
    "for a site that did not train: fits the BatchNorm statistics to its inputs,"
    " without labels",
)

# There is a situation for each heading of docs/choose.md. FedTAN comes first if its
# exchanges pay. With E = 1 it is centralised training, but with many steps only the
# first step is synchronised.
ONE_STEP = Situation(
    "label skew, one local step a round",
    "label-skew",
    (_FEDTAN, _FEDTAN2, FIXBN, GROUP),
    "3 L + 1 exchanges a round for L BatchNorm layers, instead of one for FedAvg",
    (
        StudyGain(
            "fixbn-table1-full",
            "CIFAR-10, ResNet-20, round 48,000",
            "fedtan",
            "36.39",
            "89.73",
        ),
    ),
)
SOME_STEPS = Situation(
    f"label skew, up to {_MANY} local steps a round",
    "label-skew",
    (_FEDTAN, _FEDTAN2, FIXBN, GROUP),
    ONE_STEP.cost,
    (
        StudyGain("which-mnist", "MNIST, MLP, E = 5", "fedtan", "78.5", "94.4"),
        StudyGain("which-cifar", "CIFAR-10, LeNet, E = 20", "fedtan", "43.3", "46.7"),
    ),
)
MANY_STEPS = Situation(
    f"label skew, {_MANY} local steps or more",
    "a-hundred-local-steps",
    (FIXBN, _FEDTAN2, _WEIGHTS, GROUP),
    "no further messages, but the learning rate must fall when the statistics freeze",
    (
        StudyGain(
            "fixbn-table4-full",
            "CIFAR-10, ResNet-20, E = 100",
            "fixbn",
            "42.91",
            "76.24",
        ),
    ),
)
FEW_MESSAGES = Situation(
    "label skew, and no more messages than FedAvg sends",
    "few-messages",
    (FIXBN, GROUP),
    MANY_STEPS.cost,
    (StudyGain("which-mnist", "MNIST, MLP, E = 5", "fixbn", "78.5", "93.5"),),
)
FEATURE_SHIFT = Situation(
    "feature shift: other cameras, scanners, styles",
    "feature-shift",
    (FEDBN, _SILOBN, FEDWON, _CALIBRATE),
    "less traffic, a model for each client, and none for a client that never trained",
    (
        StudyGain(
            "office-300",
            "Office-Caltech-10, 62 images a client",
            "fedbn",
            "62.96",
            "71.24",
        ),
    ),
)
SMALL_BATCHES = Situation(
    "batches of up to four examples",
    "small-batches",
    (
        Remedy(
            "batch-size=16",
            "or more: the noise of a batch's statistics falls as 1 / sqrt(batch size)",
        ),
        GROUP,
        FEDWON,
        FIXBN,
    ),
    "memory",
)
NEW_CLIENTS = Situation(
    "clients that did not train",
    "clients-that-did-not-train",
    (
        Remedy(
            "strategy=fedbn eval-on=averaged-bn",
            "uses the average of the BatchNorm layers that the clients keep",
        ),
        _CALIBRATE,
    ),
    "each client sends the BatchNorm that it keeps, once before a test",
)
SITUATIONS = (
    ONE_STEP,
    SOME_STEPS,
    MANY_STEPS,
    FEW_MESSAGES,
    FEATURE_SHIFT,
    SMALL_BATCHES,
    NEW_CLIENTS,
)


def label_skew(local_steps: int) -> Situation:
    """Return the situation of label skew with E local steps (0 if E is unknown)."""
    if local_steps == 1:
        return ONE_STEP
    if 1 < local_steps < _MANY:
        return SOME_STEPS
    # If E is unknown, use this situation as well, because its first remedy costs no
    # messages.
    return MANY_STEPS
