r"""FixBN: FedAvg with BN until round T*, then with frozen global BN statistics.

Zhong et al. 2023, "Making Batch Normalization Great in Federated Deep Learning",
arXiv:2303.06530, Algorithm 1, B.6.

## When

Use when: there is label skew with many local steps, or no more messages than in FedAvg
are possible. Lower the rate after T*.

Not when: the run is too short for good statistics at T*.

## Problem

In training, a BN layer normalises with the statistics of a client's batch. In tests, it
uses the averaged statistics. If the clients have different data, both do not match, and
the gradients are biased. After some rounds, the averaged statistics are good enough for
training.

## Algorithm

Rounds $1 \dots T^*$ are rounds of FedAvg with the weights $p_i$. $S(T^*)$ are the global
statistics after round $T^*$. From round $T^* + 1$, BN is in eval mode in local training
and normalises with $S(T^*)$:

$$\hat{y} = \gamma \, \frac{y - \mu(T^*)}{\sqrt{\sigma^2(T^*) + \epsilon}} + \beta$$

$S(T^*)$ stays bit-identical to the end of the run and is used in tests. Gamma and beta
still learn, unless `freeze_affine` is set.

$T^*$ is `freeze_at`. With `freeze_at="auto"`, client $m$ sends `delta`, the distance
that its statistics moved in the round,

$$\delta_m = \frac{\lVert S_m - S \rVert_1}{\text{number of entries}}$$

and the server takes the mean $\sum_m p_m \delta_m$ of each round. The statistics freeze
for good after the first round in which at least $W$ means exist and the last $W$ of
them have a population variance below $\tau$. $W$ is `freeze_window`, $\tau$ is
`freeze_tau`.

## The learning rate after the freeze

Lower the rate after $T^*$. Frozen statistics do not follow the activations, so a rate
that trains well up to $T^*$ may diverge afterwards. With its decay,
`lr-decay-at=freeze`, the recipe `apps/main/recipes/fixbn.yaml` reaches 92.20 %. Without
the decay, it diverges in round 32 of 60, with $T^*$ = 30.

## Differs from the paper

The weights are from eq. (6); Algorithm 1 prints $1/M$, the case of equal sizes. The
rule for the automatic $T^*$ is partly ours. B.6 has a variance for each client, but does
not specify which client's variance must be small; here it is the variance of the mean.
The paper recommends a large $W$ and a small $\tau$ without numbers. $W$ = 100 and $\tau$
= 0.002 are calibrated on MNIST (`docs/results/papers.md`). $\delta$ has the scale of the
statistics, so another network may need another $\tau$.

## Law

After $T^*$, with one step, full participation and batches proportional to $|D_i|$, a
round is one centralized step with frozen BN.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import AfterValidator
from torch import Tensor, nn

from fedbn_flwr.batchnorm.averaging import statistics_moved
from fedbn_flwr.batchnorm.layers import batchnorm_layers
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.errors import NothingTrainedError
from fedbn_flwr.problems import Problem
from fedbn_flwr.server.methods.method import Ask, Facts, Method, Replies
from fedbn_flwr.server.methods.params import Params, setting
from fedbn_flwr.server.methods.phases import BATCHNORM, TRACKED, Extra, Phase
from fedbn_flwr.server.strategy import Strategy
from fedbn_flwr.training.client_hook import ClientHook
from fedbn_flwr.training.freezing import force_eval, layers_of
from fedbn_flwr.training.settings import round_of


def _check_at(at: int | float | str) -> int | float | str:
    """Return ``at`` as a round >= 0 (int), a fraction in [0, 1] (float) or "auto".

    Raises:
        ValueError: the value is not one of these.
    """
    # The type decides: 1 (int) is a round, and 1.0 (float) means all rounds.
    if isinstance(at, str) and at != "auto":
        raise ValueError(
            f"{at!r} is not a round (int), a fraction of the rounds (float in [0, 1])"
            " or 'auto'"
        )
    if isinstance(at, float) and not 0 <= at <= 1:
        raise ValueError(f"{at} is not a fraction in [0, 1]; for a round write an int")
    if isinstance(at, int) and at < 0:
        raise ValueError(
            f"{at} is not a round; the first is 1, and 0 freezes from the start"
        )
    return at


At = Annotated[int | float | str, AfterValidator(_check_at)]
_AUTO = {"freeze-at": ("auto",), "fedtan-rounds": ("auto",)}


class WindowParams(Params):
    """Parameters of the window rule for an automatic round."""

    freeze_window: int = setting(
        100,
        "window W of an automatic round, in rounds; must be below R",
        only_if=_AUTO,
        ge=2,
    )
    freeze_tau: float = setting(
        2e-3,
        "threshold tau of an automatic round: the variance of delta",
        only_if=_AUTO,
        gt=0,
    )


class FixBNParams(WindowParams):
    """Parameters of FixBN."""

    freeze_at: At = setting(
        0.5, "T*: a round (int), a fraction of R (float, T* = floor(f R)) or `auto`"
    )
    freeze_affine: bool = setting(False, "freeze gamma and beta as well (Table H)")


DELTA = "statistics-delta"  # float: delta_m
FREEZE_AFFINE = "fedbn-flwr.freeze-affine"  # bool: gamma and beta


# --- the clients ----------------------------------------------------------------------
class FreezeBN(ClientHook):
    """Client code that keeps BN in eval mode, even after ``model.train()``.

    The server asks for this hook after round T*. ``affine`` also freezes gamma and
    beta. ``paths`` are the paths of the layers; an empty collection means all layers.
    """

    def __init__(self, affine: bool, paths: Collection[str] = ()) -> None:
        self.affine, self.paths = affine, paths
        self._undo: list[Callable[[], object]] = []

    def begin(self, model: nn.Module) -> None:
        """Put the BN layers in eval mode, and freeze gamma and beta if ``affine``."""
        layers = batchnorm_layers(model, self.paths)
        self._undo = [force_eval(layer) for layer in layers]
        if not self.affine or not layers:
            return
        # Freeze the same entries as the server. Further parameters of a layer are in
        # REST.
        at = layers_of(model, every_path=True)
        paths = [path for path, layer in at.items() if layer in layers]
        affine = split_state(model, paths).affine
        # Include duplicates: gamma may be tied to a parameter that is named before it.
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in affine and parameter.requires_grad:
                parameter.requires_grad_(False)
                self._undo.append(partial(parameter.requires_grad_, True))

    def end(self, model: nn.Module) -> dict[str, float]:
        """Undo the changes of ``begin``."""
        for undo in self._undo:
            undo()
        return {}


class MeasureDrift(ClientHook):
    """Client code that reports delta_m, the distance that the statistics moved.

    The search for an automatic T* uses delta_m. ``paths`` are the paths of the layers;
    an empty collection means all layers.
    """

    compares_with_start = True

    def __init__(self, paths: Collection[str] = ()) -> None:
        self.paths = paths
        self._received: list[Tensor] = []

    def begin(self, model: nn.Module) -> None:
        """Store the statistics as received."""
        self._received = [statistic.clone() for statistic in self._statistics(model)]

    def end(self, model: nn.Module) -> dict[str, float]:
        """Return delta_m = ||S_m - S||_1 / number of entries, in float64."""
        distances = []
        for now, before in zip(self._statistics(model), self._received, strict=True):
            distances.append((now.double() - before.double()).abs().sum())
        entries = sum(statistic.numel() for statistic in self._received)
        return {DELTA: float(torch.stack(distances).sum()) / entries}

    def _statistics(self, model: nn.Module) -> list[Tensor]:
        found = []
        for layer in batchnorm_layers(model, self.paths):
            found += [layer.running_mean, layer.running_var]
        return [statistic for statistic in found if statistic is not None]


# --- the server -----------------------------------------------------------------------
@dataclass(frozen=True)
class Frozen:
    """The state of a method that freezes BN statistics.

    Attributes:
        frozen_after: the last round before the statistics are frozen; None as long
            as the round is unknown.
        deltas: the p-weighted mean of delta_m in each round, until an automatic round
            is found.
    """

    frozen_after: int | None = None
    deltas: Sequence[float] = ()


class FixBNMethod(Method[Any, Frozen]):
    """FedAvg that freezes the BN statistics after round T* (``freeze_at``).

    FedTAN-II also freezes, after rounds of FedTAN and with another key.

    Attributes:
        key: the config key of T*.
    """

    name = "fixbn"
    role = "client-hooks"
    summary_line = "BN statistics frozen mid-way, after round T*"
    source = "Zhong 2023, arXiv:2303.06530"
    Params: ClassVar[type[Any]] = FixBNParams
    State = Frozen
    key: ClassVar[str] = "freeze-at"
    client_hooks = {
        "freeze-bn": lambda context: FreezeBN(
            bool(context.config[FREEZE_AFFINE]), context.layers
        ),
        "report-drift": lambda context: MeasureDrift(context.layers),
    }

    @property
    def frozen_parts(self) -> frozenset[Any]:
        """The parts of BN that the method freezes."""
        return BATCHNORM if self.params.freeze_affine else TRACKED

    def first_phase(self) -> Phase:
        """Return the phase before BN is frozen, the same as in FedAvg."""
        return Phase("train")

    def freezes_after(self, num_rounds: int) -> int | None:
        """Return T*, or None if the run determines T*.

        A fraction f means floor(f R).
        """
        return round_of(self.params.freeze_at, num_rounds)

    def phases(self) -> tuple[Phase, ...]:
        """Return the phases before and after the freeze."""
        first = self.first_phase()
        if self.params.freeze_at == "auto":
            why = f"{self.key}=auto follows delta_m of each client"
            delta = Extra(
                DELTA,
                "scalar",
                why,
                read="mean",
                required=True,
                instead="a fixed round",
            )
            first = replace(first, extras=(delta,))
        after = self.key.replace("-", "_")
        return first, Phase("frozen", frozen=self.frozen_parts, after=after)

    def begin(self, facts: Facts) -> Frozen:
        """Return the first state, with T* if it is known."""
        rounds = 0
        # Ask for R only if it is needed, because Flower's own loops do not report it.
        at = self.params.freeze_at
        if isinstance(at, float):
            rounds = facts.total_rounds(f"{self.key}={at}")
        return Frozen(self.freezes_after(rounds))

    def phase_name(self, state: Frozen, number: int) -> str:
        """Return "frozen" after the freeze, or the name of the first phase."""
        if state.frozen_after is not None and number > state.frozen_after:
            return "frozen"
        return self.first_phase().name

    def on_clients(self, state: Frozen, facts: Facts) -> list[Ask]:
        """Ask the clients to freeze BN, or to report delta_m while T* is not known."""
        if self.phase_name(state, facts.number) == "frozen":
            affine = {FREEZE_AFFINE: self.params.freeze_affine}
            # The reply need not report the hook: its frozen entries are compared with
            # the entries that were sent.
            return [Ask("freeze-bn", affine, unnamed=True, tunes=True)]
        if state.frozen_after is None:
            return [Ask("report-drift")]
        return []

    def aggregate(
        self, state: Frozen, facts: Facts, replies: Replies, model: dict[str, Any]
    ) -> tuple[dict[str, Any], Frozen]:
        """Restore frozen entries bit for bit, or look for T* if it is unknown."""
        if self.phase_name(state, facts.number) == "frozen":
            # Restore frozen entries, because the server's step of another method may
            # have changed them.
            frozen = {name: facts.before[name] for name in facts.frozen}
            return {**model, **frozen}, state
        if state.frozen_after is not None:
            return model, state
        # B.6: T* is the first round with a steady mean of delta_m. Steady means
        # that the variance over the last W rounds is small.
        means = [*state.deltas, replies.mean_of(DELTA)]
        window = means[-self.params.freeze_window :]
        full = len(window) == self.params.freeze_window
        steady = full and float(np.var(window)) < self.params.freeze_tau
        return model, Frozen(facts.number if steady else None, means)

    def outcome(self, state: Frozen, num_rounds: int) -> dict[str, Any]:
        """Return the last round before the freeze, or None if BN was not frozen."""
        frozen = self.phase_name(state, num_rounds) == "frozen"
        return {"frozen-after": state.frozen_after if frozen else None}


class FixBN(Strategy):
    """FedAvg that freezes the BN statistics after round T* (``freeze_at``).

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import FixBN
        >>> strategy = FixBN(freeze_at=1)
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> int(result.arrays["1.num_batches_tracked"].numpy())  # of round 1
        2
    """

    method = FixBNMethod


# --- what may be wrong ----------------------------------------------------------------
def _untouched(method: Any, known: Any) -> bool:
    """Return whether BN is about to be frozen at initial statistics (0 and 1)."""
    last, facts = known.state.frozen_after, known.facts
    # ``last`` is None if BN is not yet frozen. It is 0 for a freeze from the start. The
    # run has already warned of such a freeze, if it knows the number of rounds.
    if not last or known.number != last + 1:
        return False
    frozen = frozenset(facts.frozen)
    pairs = [pair for pair in facts.parts.moments() if frozen.issuperset(pair)]
    return bool(pairs) and not statistics_moved(facts.before, pairs)


def _late(method: Any, known: Any) -> str:
    """Return the new clients of a round whose own gamma and beta are frozen."""
    frozen = (method.frozen_parts - TRACKED) & known.facts.phase.local
    if not frozen or method.phase_name(known.state, known.number) != "frozen":
        return ""
    return ", ".join(
        reply.node.named_label for reply in known.replies if reply.info.began
    )


FixBNMethod.checks = (
    Problem(
        "long-window",
        "freeze-window={params.freeze_window} must be below"
        " num-server-rounds={known.num_rounds} for {method.key}=auto",
        "freeze_window freeze_at fedtan_rounds",
        needs="num_rounds",
        when=lambda method, known: (
            method.params.freeze_at == "auto"
            and known.num_rounds <= method.params.freeze_window
        ),
    ),
    Problem(
        "frozen-from-the-start",
        "{method.name}: {method.key}={params.freeze_at} of {known.num_rounds} rounds means after"
        " round 0: BN is frozen from round 1 at the statistics of the initial model,"
        " mean 0 and variance 1, so it does not normalise. Use {method.key} of 1 or more"
        " rounds, or a trained initial model.",
        "freeze_at fedtan_rounds",
        effect="warn",
        needs="num_rounds moved",
        when=lambda method, known: (
            method.freezes_after(known.num_rounds) == 0 and not known.moved
        ),
    ),
    Problem(
        "statistics-untouched",
        "{method.title} freezes BN after round {known.state.frozen_after}"
        " ({method.key}={params.freeze_at}), but no round until then changed a running"
        " statistic: BN would be frozen at mean 0 and variance 1, so it would not"
        " normalise. Use a later {method.key}, or a trained initial model.",
        effect="end",
        error=NothingTrainedError,
        stage="sending",
        when=_untouched,
    ),
    Problem(
        "trained-too-late",
        "round {known.number}: client {found} trained for the first time after"
        " {method.title} froze gamma and beta. They are local, so this client's values"
        " stay as in the initial model. Let every client train before"
        " the freeze, or leave out freeze-affine.",
        effect="warn",
        stage="replies",
        when=_late,
    ),
    Problem(
        "far-statistics",
        "Likely cause: the running statistics, frozen after round"
        " T*={known.state.frozen_after}, are far from the batches' statistics, so BN no"
        " longer keeps the activations small. In small runs, a learning rate ten times"
        " lower helped, either from the start (learning-rate) or from the freeze"
        " (lr-decay-at=freeze, or a smaller lr-decay-factor if this is set). In your"
        " own loop, lower it when the message's config has fedbn-flwr.frozen. A later T*"
        " without a lower rate delayed the divergence, but did not prevent it.",
        effect="cause",
        stage="diverged",
        when=lambda method, known: (
            method.phase_name(known.state, known.number) == "frozen"
        ),
    ),
)
