"""What to take first in each situation, what it gained, and what it costs.

The one table of advice: the doctor's remedies, the table of ``docs/choose.md`` and the
reports draw from it. Its numbers stand in ``docs/results/methods.yaml``, which has the
commands and commits; a test compares them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedbn_flwr.doctor.findings import Remedy

__all__ = [
    "FEATURE_SHIFT",
    "FEDBN",
    "FEDWON",
    "FEW_MESSAGES",
    "FIXBN",
    "GROUP",
    "MANY_STEPS",
    "NEW_CLIENTS",
    "ONE_STEP",
    "SITUATIONS",
    "SMALL_BATCHES",
    "SOME_STEPS",
    "Measured",
    "Situation",
    "label_skew",
]

_MANY = 50  # E; between the 20 steps and the 100 steps that were measured


@dataclass(frozen=True)
class Measured:
    """What the first remedy gained in one study.

    Attributes:
        study: its name in ``docs/results/methods.yaml``.
        setting: the study in a few words.
        method: the remedy there.
        fedavg: test accuracy in per cent of FedAvg with the model's BatchNorm.
        accuracy: that of the remedy.
    """

    study: str
    setting: str
    method: str
    fedavg: str
    accuracy: str

    def __str__(self) -> str:
        """Return "36.39 -> 89.73 (CIFAR-10, ...)"."""
        return f"{self.fedavg} -> {self.accuracy} ({self.setting})"


@dataclass(frozen=True)
class Situation:
    """What a user sees, and what to try.

    Attributes:
        seen: the situation in words.
        section: the heading of ``docs/choose.md`` that explains it, as its anchor.
        tries: what to try, in order.
        cost: of the first one.
        measured: the gain of the first one, by study; empty = not measured beside
            FedAvg.
    """

    seen: str
    section: str
    tries: tuple[Remedy, ...]
    cost: str
    measured: tuple[Measured, ...] = ()

    @property
    def remedies(self) -> list[Remedy]:
        """Return what to try, in order; the first one says what it gained and costs."""
        expected = f"Cost: {self.cost}"
        if self.measured:
            gains = "; ".join(map(str, self.measured))
            expected = (
                f"Accuracy of FedAvg with BatchNorm -> with it: {gains}. {expected}"
            )
        first, *others = self.tries
        return [replace(first, expected=expected), *others]


FEDBN = Remedy(
    "strategy=fedbn",
    "each client keeps its BatchNorm layers, statistics, gamma and beta, and the rest"
    " is averaged (arXiv:2102.07623)",
)
FIXBN = Remedy(
    "strategy=fixbn lr-decay-at=freeze",
    "freezes the global statistics halfway (freeze-at=0.5) and trains on under them, at"
    " a lower learning rate (arXiv:2303.06530); no further messages",
)
FEDWON = Remedy(
    "strategy=fedwon norm=wsconv",
    "convolutions with standardised weights, and no BatchNorm at all"
    " (arXiv:2306.05879)",
)
GROUP = Remedy(
    "norm=group",
    "GroupNorm has no statistics of the batch; on its own it may reach less than"
    " BatchNorm",
)
_FEDTAN = Remedy(
    "strategy=fedtan",
    "BatchNorm uses the statistics of all clients' batches, and the gradients through"
    " them (arXiv:2301.02982); a round has 3 L + 1 exchanges for L layers. With E = 1 a"
    " round is one centralised step",
)
_FEDTAN2 = Remedy(
    "strategy=fedtan2",
    "FedTAN at first, then frozen statistics: most of its gain, with few rounds of many"
    " exchanges",
)
_WEIGHTS = Remedy(
    "norm=group+ws",
    "GroupNorm, and standardised weights in front of it: the best of the long runs with"
    " many steps",
)
_SILOBN = Remedy(
    "strategy=silobn",
    "each client keeps its statistics only: gamma and beta are shared",
)
_ADAPT = Remedy(
    "fedbn-flwr evaluate RUN --dataset NEW --bn adapt",
    "for one model on data of a new site: statistics re-estimated from its inputs,"
    " without targets",
)

# A situation for each heading of docs/choose.md. FedTAN is first while its exchanges
# pay: with E = 1 it is centralised training, with many steps only the first is.
ONE_STEP = Situation(
    "label skew, one local step a round",
    "label-skew",
    (_FEDTAN, _FEDTAN2, FIXBN, GROUP),
    "3 L + 1 exchanges a round for L BatchNorm layers, where FedAvg has one",
    (
        Measured(
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
        Measured("which-mnist", "MNIST, MLP, E = 5", "fedtan", "78.5", "94.4"),
        Measured("which-cifar", "CIFAR-10, LeNet, E = 20", "fedtan", "43.3", "46.7"),
    ),
)
MANY_STEPS = Situation(
    f"label skew, {_MANY} local steps or more",
    "a-hundred-local-steps",
    (FIXBN, _FEDTAN2, _WEIGHTS, GROUP),
    "no further messages; the learning rate must fall when the statistics freeze",
    (
        Measured(
            "fixbn-table4-full",
            "CIFAR-10, ResNet-20, E = 100",
            "fixbn",
            "42.91",
            "75.44",
        ),
    ),
)
FEW_MESSAGES = Situation(
    "label skew, and no more messages than FedAvg sends",
    "few-messages",
    (FIXBN, GROUP),
    MANY_STEPS.cost,
    (Measured("which-mnist", "MNIST, MLP, E = 5", "fixbn", "78.5", "93.5"),),
)
FEATURE_SHIFT = Situation(
    "feature shift: other cameras, scanners, styles",
    "feature-shift",
    (FEDBN, _SILOBN, FEDWON, _ADAPT),
    "less traffic; a model for each client, and none for a client that never trained",
    (
        Measured(
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
        Remedy(
            "norm=batch-renorm",
            "normalises by running statistics, corrected within limits"
            " (arXiv:1702.03275)",
        ),
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
            "the average of the BatchNorm that the clients keep",
        ),
        Remedy(
            "eval-on=global-test-bn test-bn=mix",
            "BatchNorm with statistics of the client's own test inputs",
        ),
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
    """Return the situation of label skew with E local steps a round; 0 = not known."""
    if local_steps == 1:
        return ONE_STEP
    if 1 < local_steps < _MANY:
        return SOME_STEPS
    # Also where E is not known: its first remedy costs no messages.
    return MANY_STEPS
