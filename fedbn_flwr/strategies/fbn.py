r"""FBN: BN trains with global statistics that the server pools in each round.

Guerraoui, Pinot, Rizk, Stephan, Taiani 2024, "Overcoming the Challenges of Batch
Normalization in Federated Learning", arXiv:2405.14670. The full text was not read. This
module follows the abstract, the introduction, one sentence in arXiv:2410.02006 and the
baseline FBN in the public code of HBN.

## When

Use when: there is label skew, batches have any size, and there is no good round to
freeze at.

Not when: the rate is high. Statistics of the last round lag behind the weights, and
ResNet-20 diverged.

## Problem

The statistics of a client's batch differ between clients. FixBN uses global statistics
but freezes them, so they fit an ever older model. In FBN, the statistics follow the
model.

## Algorithm

BN normalises with the received statistics $S$, in training and in tests. Gamma and beta
learn, and no gradient flows through $S$. Client $i$ sends the moments (count, mean, sum
of squared deviations) of the inputs of each BN layer. `fbn-measure` selects the inputs:

- `steps`: the inputs of all local steps, merged, without an additional pass. With a
  fixed number of local steps, the counts do not reflect the amount of data. The server
  therefore pools the means $m_i$ and the biased variances $v_i = M_i / n_i$ (sum of
  squared deviations by count) with the weights $p_i$; $n$ is the sum of the counts:

$$m = \sum_i p_i m_i, \qquad v = \frac{n}{n - 1} \sum_i p_i \left( v_i + (m_i - m)^2 \right)$$

- `pass`: the inputs of one pass over the client's data before the first step, under the
  received weights. This pass normalises each batch with its own statistics. The server
  merges the moments by their counts, exactly as in StaticBN.

Then, in float64 and with $\mu$ = `statistics-momentum`,

$$S \leftarrow (1 - \mu) S + \mu \, (m, v)$$

The first `statistics-warm-up` rounds with a result are rounds of FedAvg: BN normalises
with the statistics of the batches, and $S$ becomes $(m, v)$. For a trained model with
its own statistics, use no warm-up (0). If few clients take part in a round, use a
longer warm-up or a larger $\mu$.

With `statistics-aggregation="trimmed-mean:0.2"`, the server takes, per channel, the
mean of $m_i$ over the clients, and then of $v_i + (m_i - m)^2$. Each mean has equal
weights and leaves out floor($t n$) of the $n$ clients at either end, with $t$ = 0.2. If
there are fewer than five clients, it leaves out none. False statistics from at most
floor($t n$) clients have no effect. This protects only the statistics.

## Differs from the paper

The texts that were read do not describe the exchange of statistics or the paper's
robust aggregation. The warm-up, `pass` and `trimmed-mean` are ours. The baseline in the
public code of HBN averages the means and variances of a client's batches and so leaves
out the spread between them, starts with statistics of 0 and 1, and drops trained gamma
and beta.

## Law

With one step, full participation and batches proportional to $|D_i|$, a round is one
centralized step with frozen BN. With $\mu$ = 0, FBN equals FixBN from the end of the
warm-up, bit for bit. With `steps`, one step on all data and $\mu$ = 1, the new
statistics equal one eval-mode pass over the union, at every layer, if all examples have
the same number of elements: $p_i$ weighs by examples. FBN is not centralized BN,
because no gradient flows through the statistics.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import AfterValidator
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import TypeVar

from fedbn_flwr.batchnorm.reestimation import (
    Moments,
    MomentSums,
    pool,
    reestimate_statistics,
    stop_tracking,
)
from fedbn_flwr.batchnorm.replaced_forward import layers_in_training, watch_inputs
from fedbn_flwr.messages.moment_record import decode_moments, encode_moments
from fedbn_flwr.messages.protocol import Key
from fedbn_flwr.problems import Problem
from fedbn_flwr.server.methods.method import (
    Ask,
    Facts,
    Method,
    Replies,
    Reply,
)
from fedbn_flwr.server.methods.moment_pool import (
    UNMEASURED,
    pooled_statistics,
    unmeasured,
)
from fedbn_flwr.server.methods.params import Params, setting
from fedbn_flwr.server.methods.travels import TRACKED, Extra, Travels
from fedbn_flwr.server.strategy import Strategy
from fedbn_flwr.training.batches import Batches
from fedbn_flwr.training.checkpointing import in_checkpoint
from fedbn_flwr.training.client_hook import ClientHook, Entries, Extras
from fedbn_flwr.training.freezing import force_eval
from fedbn_flwr.training.settings import share_of


class PooledParams(Params):
    """Parameters of methods that train with pooled statistics."""

    statistics_momentum: float = setting(
        0.1,
        "mu: the share of a round's pooled statistics in the global statistics; 0 keeps"
        " the global ones unchanged",
        ge=0,
        le=1,
    )
    statistics_warm_up: int = setting(
        1,
        "rounds of plain FedAvg at the start; after each, the pooled statistics replace"
        " the global statistics; 0 for a pretrained model",
        ge=0,
    )


def trimmed_share(value: str) -> float | None:
    """Return the share that a trimmed mean removes at each end, or None for the mean.

    Raises:
        ValueError: the value is not a mean or a trimmed mean.
    """
    if value == "mean":
        return None
    name, _, share = value.partition(":")
    with contextlib.suppress(ValueError):
        if name == "trimmed-mean" and 0 <= float(share) < 0.5:
            return float(share)
    raise ValueError(
        f"{value!r} is neither mean nor trimmed-mean:SHARE with a share of at least 0"
        " and below 0.5"
    )


def _check_aggregation(value: str) -> str:
    trimmed_share(value)
    return value


class FBNParams(PooledParams):
    """Parameters of FBN."""

    fbn_measure: Literal["steps", "pass"] = setting(
        "steps",
        "the inputs of BN that give its statistics: steps uses all local steps, pass"
        " uses one pass before the first step",
    )
    statistics_aggregation: Annotated[str, AfterValidator(_check_aggregation)] = (
        setting(
            "mean",
            "pooling of the clients' statistics: mean; or trimmed-mean:SHARE (ours),"
            " such as trimmed-mean:0.2, which leaves out floor(SHARE x clients of the"
            " round) of the smallest and of the largest values",
        )
    )


BN_MOMENTS = Key.up(
    "bn-moments", "ArrayRecord: count, mean and m2 of the inputs of each BN layer"
)
WARM_UP = Key.down(
    "fedbn-flwr.statistics-warm-up", "bool: BN normalises with the batches' statistics"
)


class GlobalStatistics(ClientHook):
    """Client code that lets BN use the received statistics and measures its inputs.

    In a round of the warm-up, BN normalises with the batches' statistics.
    ``SurveyedStatistics`` takes the moments of one pass before the first step instead.
    """

    in_batchnorm = True
    of_all_steps = (
        "BatchNorm's moments depend on all steps: return the weights of the last step,"
        " or use fbn_measure='pass'"
    )

    def __init__(self, warm_up: bool) -> None:
        self._warm_up = warm_up
        self._model: nn.Module
        self._layers: list[_BatchNorm] = []
        self._undo: list[Callable[[], None]] = []
        self._sums = MomentSums()
        self._moments: Entries = {}

    def begin(self, model: nn.Module) -> None:
        """Let the layers normalise as the round requires, and measure their inputs."""
        self._model = model
        self._layers = list(layers_in_training(model).values())
        self._change_layers()

    def end(self, model: nn.Module) -> dict[str, float]:
        """Restore the layers and encode the moments."""
        self._restore_layers()
        self._moments = encode_moments(self._measured(model), model.state_dict())
        return {}

    def reply(self) -> Extras:
        """Return the moments."""
        return {BN_MOMENTS: self._moments}

    def _measured(self, model: nn.Module) -> Mapping[str, Moments]:
        return self._sums.by_path(model)

    def _change_layers(self) -> None:
        if self._warm_up:
            self._undo = [stop_tracking(self._layers)]
        else:
            self._undo = [force_eval(layer) for layer in self._layers]
        self._undo += [watch_inputs(layer, self._note) for layer in self._layers]

    def _restore_layers(self) -> None:
        # Undo the last change first, because each function restores the state that it
        # has found.
        while self._undo:
            self._undo.pop()()

    def _note(self, layer: nn.Module, x: Tensor) -> None:
        # Ignore a test in the middle of the training. Check the mode of the model,
        # because the layers stay in eval mode. A reentrant checkpoint computes the
        # first of its two passes without gradients.
        if self._model.training and (torch.is_grad_enabled() or in_checkpoint()):
            self._sums.add(layer, x)


class Surveyed(ClientHook):
    """Client code that measures all data in a pass with the received weights."""

    _found: Mapping[str, Moments] = {}

    def survey(
        self, model: nn.Module, data: Batches, batch_size: int, seed: int
    ) -> None:
        """Pass the data through the model in train mode, with statistics unchanged."""
        self._found = reestimate_statistics(
            model, data, batch_size=batch_size, seed=seed, forward=self.passes
        )

    def _measured(self, model: nn.Module) -> Mapping[str, Moments]:
        return self._found


class SurveyedStatistics(Surveyed, GlobalStatistics):
    """Client code that measures in a pass of plain BN before the first step."""

    of_all_steps = ""

    def __init__(self, warm_up: bool) -> None:
        super().__init__(warm_up)
        # After the warm-up, the layers are in eval mode and measure nothing in steps.
        self.in_batchnorm = warm_up

    def survey(
        self, model: nn.Module, data: Batches, batch_size: int, seed: int
    ) -> None:
        """Pass the data through the model."""
        # Use plain BN in the pass: each batch is normalised with its own statistics.
        self._restore_layers()
        try:
            super().survey(model, data, batch_size, seed)
        finally:
            self._change_layers()

    def _note(self, layer: nn.Module, x: Tensor) -> None:
        """Ignore the inputs of the steps."""


def trimmed(moments: Sequence[Moments], share: float) -> Moments:
    """Return the trimmed mean of the clients' statistics, with equal weights.

    At either end, floor(share n) of n clients are left out: first for the means, then
    for var_i + (mean_i - mean)^2, and for the counts. The count of the result is n
    times the trimmed mean of the counts.
    """
    cut = share_of(share, len(moments))

    def middle(values: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(values)).sort(0).values[cut : len(values) - cut].mean(0)

    mean = middle([one.mean for one in moments])
    # Use variances about the trimmed mean: a client with a false mean then has a large
    # variance.
    var = middle([one.m2 / one.count + (one.mean - mean).square() for one in moments])
    counts = [torch.tensor(one.count, dtype=torch.float64) for one in moments]
    count = round(float(middle(counts)) * len(moments))
    return Moments(count, mean, count * var)


P = TypeVar("P", bound=PooledParams, default=PooledParams)


@dataclass(frozen=True)
class Pooled:
    """The state of a method that trains with pooled statistics.

    Attributes:
        num_pooled: the number of rounds with pooled statistics so far; the warm-up ends
            with enough such rounds.
        warmed_up_after: the last round of the warm-up; None during the warm-up.
    """

    num_pooled: int = 0
    warmed_up_after: int | None = None


S = TypeVar("S", bound=Pooled, default=Pooled)


class PooledStatisticsMethod(Method[P, S]):
    """The common base of methods that train with pooled global statistics."""

    role = "client-hooks"
    State = Pooled

    def travels(self, num_rounds: int | None = None) -> tuple[Travels, ...]:
        """Return a phase with frozen statistics that also collects the moments."""
        why = (
            f"strategy={self.name} sends the moments of BatchNorm's inputs on the"
            " clients' data"
        )
        return (
            Travels(
                frozen=TRACKED,
                extras=(Extra(BN_MOMENTS, "moments", why),),
                after=self.params.statistics_warm_up,
                after_setting="statistics_warm_up",
            ),
        )

    def pool(self, moments: Sequence[Moments], weights: Sequence[float]) -> Moments:
        """Return a layer's moments of all clients, merged by their counts.

        ``weights`` are the p_i before normalisation. Only subclasses use them.
        """
        return pool(moments)

    def begin(self, facts: Facts) -> S:
        """Start the run in the warm-up, if there is a warm-up."""
        over_since = None if self.params.statistics_warm_up else 0
        return replace(super().begin(facts), warmed_up_after=over_since)

    def phase(self, state: S, number: int) -> str:
        """Return "warm-up" during the warm-up, and "" after it."""
        if state.warmed_up_after is None or number <= state.warmed_up_after:
            return "warm-up"
        return ""

    def aggregate(
        self, state: S, facts: Facts, replies: Replies, model: dict[str, Any]
    ) -> tuple[dict[str, Any], S]:
        """Move the statistics towards the pooled statistics of the round."""
        sent = _moments(facts, replies)
        pooled = pooled_statistics(
            facts.parts, sent, replies.weights, self.pool, facts.before
        )
        # S <- (1 - mu) S + mu (m, v); in the warm-up (m, v) replaces S.
        mu = self.params.statistics_momentum
        if self.phase(state, facts.number) == "warm-up":
            mu = 1.0
        for name, new in pooled.items():
            old = facts.before[name]
            moved = (1 - mu) * old.astype(np.float64) + mu * new
            model[name] = moved.astype(old.dtype)
        # Only rounds with pooled statistics count for the warm-up, because BN
        # normalises with these statistics afterwards. The initial statistics of a new
        # model (mean 0, variance 1) do not normalise.
        num_pooled = state.num_pooled + bool(pooled)
        after = state.warmed_up_after
        if after is None and num_pooled >= self.params.statistics_warm_up:
            after = facts.number
        return model, replace(state, num_pooled=num_pooled, warmed_up_after=after)


def _moments(facts: Facts, replies: Sequence[Reply]) -> list[dict[str, Moments]]:
    """Return the moments from each client, by layer."""
    found = []
    for reply in replies:
        record = reply.extras.get(BN_MOMENTS, {})
        found.append(decode_moments(record, facts.before, facts.parts))
    return found


class FBNMethod(PooledStatisticsMethod[FBNParams]):
    """FedAvg whose BN trains with global statistics, pooled from steps or a pass."""

    name = "fbn"
    summary_line = (
        "BN trains with global statistics, pooled from the clients' moments in each"
        " round"
    )
    source = "Guerraoui 2024, arXiv:2405.14670 (full text not read)"
    Params = FBNParams
    client_hooks = {
        "global-statistics": lambda context: GlobalStatistics(
            bool(context.config[WARM_UP])
        ),
        "surveyed-statistics": lambda context: SurveyedStatistics(
            bool(context.config[WARM_UP])
        ),
    }

    def on_clients(self, state: Pooled, facts: Facts) -> list[Ask]:
        """Ask for moments of steps or of a pass, and send whether BN warms up."""
        warms_up = self.phase(state, facts.number) == "warm-up"
        hook = "surveyed-statistics"
        if self.params.fbn_measure == "steps":
            hook = "global-statistics"
        return [Ask(hook, {WARM_UP: warms_up}, tunes=True)]

    def pool(self, moments: Sequence[Moments], weights: Sequence[float]) -> Moments:
        """Pool by p_i after steps, by counts after a pass, or take the trimmed mean."""
        share = trimmed_share(self.params.statistics_aggregation)
        if share is not None:
            return trimmed(moments, share)
        return pool(moments, weights if self.params.fbn_measure == "steps" else None)


class FBN(Strategy):
    """FedAvg whose BN trains with global statistics, pooled from steps or a pass.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import FBN
        >>> strategy = FBN(fbn_measure="pass")
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
    """

    method = FBNMethod


# --- what may be wrong ----------------------------------------------------------------
def _without_moments(method: Any, known: Any) -> str:
    """Return the number of replies without moments and the effect, as a text."""
    without = sum(not reply.extras.get(BN_MOMENTS) for reply in known.replies)
    if not without:
        return ""
    what = "the statistics come from the other replies"
    if without == len(known.replies):
        what = "the statistics do not change"
    return (
        f"{without} of {len(known.replies)} replies have no moments of BatchNorm's"
        f" inputs; {what}"
    )


def _unmeasured(method: Any, known: Any) -> str:
    """Return the layers that got no moments in the first round with moments."""
    if known.state.num_pooled:
        return ""
    return unmeasured(known.facts.parts, _moments(known.facts, known.replies))


def _trims_nobody(method: Any, known: Any) -> str:
    """Return the share of the trimmed mean if it leaves out no client."""
    share, count = (
        trimmed_share(method.params.statistics_aggregation),
        len(known.replies),
    )
    if not share or share_of(share, count):
        return ""
    return f"{share} of {count} clients"


PooledStatisticsMethod.rows = (
    replace(UNMEASURED, when=_unmeasured),
    Problem(
        "without-moments",
        "round {known.number}: {found}",
        effect="warn",
        stage="replies",
        when=_without_moments,
    ),
    Problem(
        "lagging-statistics",
        "Likely cause: the global statistics belong to earlier weights and are far from"
        " the batches' statistics, so BN does not keep the activations small. In small"
        " runs, a fifth of the learning-rate helped.",
        effect="cause",
        stage="diverged",
        when=lambda method, known: not method.phase(known.state, known.number),
    ),
)
FBNMethod.rows = (
    *PooledStatisticsMethod.rows,
    Problem(
        "trims-nobody",
        "round {known.number}: trimmed-mean:{found} leaves nobody out; the statistics"
        " are a mean with equal weights, and a client with false moments counts in"
        " full",
        effect="warn",
        stage="replies",
        when=_trims_nobody,
    ),
    Problem(
        "statistics-of-a-pass",
        "fbn-measure=steps also helped.",
        effect="remedy",
        stage="diverged",
        when=lambda method, known: (
            method.params.fbn_measure == "pass"
            and not method.phase(known.state, known.number)
        ),
    ),
)
