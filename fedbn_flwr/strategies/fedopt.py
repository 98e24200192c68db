r"""FedOpt: FedAdagrad, FedYogi and FedAdam on the server, safe for BatchNorm.

Reddi et al. 2021, "Adaptive Federated Optimization", arXiv:2003.00295, Algorithms 1
and 2.

## When

Use when: entries of the model need steps of different size, such as for rare features.

Not when: the server's rate cannot be tuned, or BatchNorm causes the problem.
BatchNorm's statistics are averaged as in FedAvg.

## Problem

Entries of the model need steps of different size, but the plain average treats all
entries alike. An optimizer on the server adapts the step of each entry. If it also
updates running variances, it drives them below zero and the model to NaN.

## Algorithm

$\Delta$ is the average of the replies minus the state before the round. The server
keeps $m$ and $v$, which start at 0:

$$m \leftarrow \beta_1 m + (1 - \beta_1) \Delta, \qquad x \leftarrow x + \eta \, \frac{m}{\sqrt{v} + \tau}$$

The three methods differ in $v$:

$$\text{FedAdagrad:} \quad v \leftarrow v + \Delta^2$$

$$\text{FedYogi:} \quad v \leftarrow v - (1 - \beta_2) \, \Delta^2 \, \mathrm{sign}(v - \Delta^2)$$

$$\text{FedAdam:} \quad v \leftarrow \beta_2 v + (1 - \beta_2) \, \Delta^2$$

$\eta$ is `eta`, $\tau$ is `tau`, $\beta_1$ is `beta_1` (FedAdagrad: 0), $\beta_2$ is
`beta_2`. The computation is in float64.

## Differs from the paper

The paper has no BatchNorm. Here the optimizer updates the entries that a client's
optimizer can train: gamma, beta and the other parameters. Buffers, such as running
statistics, counters and moving averages, and parameters without `requires_grad` are
averaged as in FedAvg, because an optimizer drives a running variance below zero
(`benchmarks/server_optimizers.py`). Names do not show which entries are buffers:
without the model, an entry whose name is not a parameter's of a layer of torch is
refused, and `parts=split_state(model)` is asked for. As in Flower, $\Delta$ is weighted by the number
of examples, $v$ starts at 0 (in the paper at least at $\tau^2$), and Adam's step is
corrected for the start, with exponent $t + 1$. $t$ is the number of the round, and
rounds without replies count. As in torch, a complex entry is two numbers.

## Law

On a model without BN it gives the same numbers as Flower's own strategies, to rounding.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from typing_extensions import TypeVar

from fedbn_flwr.batchnorm.array_types import Array
from fedbn_flwr.batchnorm.averaging import wide_type
from fedbn_flwr.problems import Problem
from fedbn_flwr.server.methods.method import Facts, Method, Replies
from fedbn_flwr.server.methods.params import Params, setting
from fedbn_flwr.server.methods.phases import Phase
from fedbn_flwr.server.strategy import Strategy

SERVER_RATE = "the server's learning rate (eta_g)"


class FedAdagradParams(Params):
    """Parameters of FedAdagrad. ``eta`` is Flower's name for the learning rate."""

    eta: float = setting(0.1, SERVER_RATE, key="server-learning-rate", gt=0)
    tau: float = setting(1e-3, "tau, the degree of adaptivity", gt=0)


class AdaptiveParams(FedAdagradParams):
    """Parameters of FedAdam."""

    beta_1: float = setting(0.9, "beta_1, decay of the first moment", ge=0, lt=1)
    beta_2: float = setting(0.99, "beta_2, decay of the second moment", ge=0, lt=1)


class FedYogiParams(AdaptiveParams):
    """Parameters of FedYogi, as for FedAdam but with Flower's own default of eta."""

    eta: float = setting(0.01, SERVER_RATE, key="server-learning-rate", gt=0)


P = TypeVar("P", bound=Params, default=Params)
Moments = Sequence[Any]  # the moments of an entry, as arrays in float64


@dataclass(frozen=True)
class ServerMoments:
    """The state of a server optimizer, with the moments of each entry by name."""

    moments: Mapping[str, Moments] = field(default_factory=dict)


class ServerStep(Method[P, ServerMoments]):
    """Algorithm 1, with the clients' mean change as the server's gradient.

    A method implements ``step``. Entries that are frozen or that stay with the clients
    (``combined(FedAdam, FixBN)``) are not stepped.

    Attributes:
        server_rate: the name of the parameter for the server's learning rate. The
            advice for a diverged run uses it.
    """

    role = "server-step"
    State = ServerMoments
    server_rate: ClassVar[str]

    def phases(self) -> tuple[Phase, ...]:
        """Return a phase whose server step comes from this method.

        The method needs only the mean change of the clients.
        """
        return (Phase(decides=frozenset({"server step"})),)

    @abstractmethod
    def step(
        self, number: int, delta: Array, moments: Moments
    ) -> tuple[Array, Moments]:
        """Return the change of an entry, and its new moments.

        ``delta`` is Delta_t, in float64. ``moments`` is empty in the first step.
        """

    def aggregate(
        self,
        state: ServerMoments,
        facts: Facts,
        replies: Replies,
        model: dict[str, Any],
    ) -> tuple[dict[str, Any], ServerMoments]:
        """Step every floating entry except buffers from its previous value."""
        moments = dict(state.moments)
        for name in facts.stepped:
            mean = model[name]
            x = _as_real(facts.before[name])
            delta = _as_real(mean) - x
            step, moments[name] = self.step(facts.number, delta, moments.get(name, ()))
            moved = np.asarray(x + step).view(wide_type(mean))
            model[name] = moved.reshape(mean.shape).astype(mean.dtype)
        return model, ServerMoments(moments)


def _as_real(array: Array) -> Array:
    """Return an entry in float64, with two numbers for a complex one, as torch does."""
    wide = array.astype(wide_type(array), order="C")
    return np.atleast_1d(wide).view(np.float64) if wide.dtype.kind == "c" else wide


A = TypeVar("A", bound=FedAdagradParams, default=FedAdagradParams)


class FedAdagradMethod(ServerStep[A]):
    """Adaptive server step whose second moment only grows, by Delta^2."""

    name = "fedadagrad"
    summary_line = "FedAvg with Adagrad on the server; BN statistics averaged"
    source = "Reddi 2021, arXiv:2003.00295"
    Params = FedAdagradParams
    server_rate = "eta"

    def step(
        self, number: int, delta: Array, moments: Moments
    ) -> tuple[Array, Moments]:
        """Return eta_t m / (sqrt(v) + tau), and (m, v)."""
        m, v = moments or (np.zeros(()), np.zeros(()))
        m = self.beta_1 * m + (1 - self.beta_1) * delta
        v = self.second_moment(v, delta**2)
        step = self.rate(number) * m / (np.sqrt(v) + self.params.tau)
        return np.asarray(step), (m, v)

    @property
    def beta_1(self) -> float:
        """The decay of the first moment."""
        return 0.0

    def second_moment(self, v: Array, square: Array) -> Array:
        """Return the new v from the old v and Delta^2."""
        return v + square

    def rate(self, number: int) -> float:
        """Return eta_t."""
        return float(self.params.eta)


class FedAdamMethod(FedAdagradMethod[AdaptiveParams]):
    """Adam's bias-corrected server step, with v = beta_2 v + (1 - beta_2) Delta^2."""

    name = "fedadam"
    summary_line = "FedAvg with Adam on the server; BN statistics averaged"
    Params = AdaptiveParams

    @property
    def beta_1(self) -> float:
        """The decay of the first moment."""
        return float(self.params.beta_1)

    def second_moment(self, v: Array, square: Array) -> Array:
        """Return beta_2 v + (1 - beta_2) Delta^2."""
        return self.params.beta_2 * v + (1 - self.params.beta_2) * square

    def rate(self, number: int) -> float:
        """Return eta sqrt(1 - beta_2^(t+1)) / (1 - beta_1^(t+1))."""
        # Use the exponent t + 1, as Flower does. Kingma and Ba use t.
        t = number + 1
        p = self.params
        return float(p.eta * math.sqrt(1 - p.beta_2**t) / (1 - p.beta_1**t))


class FedYogiMethod(FedAdamMethod):
    """Yogi's server step, with v moving by (1 - beta_2) Delta^2 towards Delta^2."""

    name = "fedyogi"
    summary_line = "FedAvg with Yogi on the server; BN statistics averaged"
    Params = FedYogiParams

    def second_moment(self, v: Array, square: Array) -> Array:
        """Return v - (1 - beta_2) Delta^2 sign(v - Delta^2)."""
        return np.asarray(v - (1 - self.params.beta_2) * square * np.sign(v - square))

    def rate(self, number: int) -> float:
        """Return eta."""
        return float(self.params.eta)


class FedAdagrad(Strategy):
    """Adaptive server step whose second moment only grows, by Delta^2.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import FedAdagrad
        >>> strategy = FedAdagrad(eta=0.03)
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> int(result.arrays["1.num_batches_tracked"].numpy())  # no step
        4
    """

    method = FedAdagradMethod


class FedAdam(Strategy):
    """Adam's bias-corrected server step, with v = beta_2 v + (1 - beta_2) Delta^2.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import FedAdam
        >>> strategy = FedAdam(eta=0.03)
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> int(result.arrays["1.num_batches_tracked"].numpy())  # no step
        4
    """

    method = FedAdamMethod


class FedYogi(Strategy):
    """Yogi's server step, with v moving by (1 - beta_2) Delta^2 towards Delta^2.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import FedYogi
        >>> strategy = FedYogi(eta=0.03)
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> int(result.arrays["1.num_batches_tracked"].numpy())  # no step
        4
    """

    method = FedYogiMethod


# --- what may be wrong ----------------------------------------------------------------
def _server_rate(method: Any, known: Any) -> str:
    """Return the remedy for the server's learning rate."""
    rate = getattr(method.params, method.server_rate)
    default = type(method.params).model_fields[method.server_rate].default
    given = f"server-learning-rate={rate:g}"
    if rate > default:
        return f"{given}. In small runs, its default, {default:g}, helped."
    return f"lower {given}."


STEPPED_BUFFERS = Problem(
    "stepped-buffers",
    "entry '{found}' may be a buffer, such as a moving average, which {method.title}"
    " must average instead of step. Without the model, only running_mean and running_var"
    " are known as buffers: pass parts=split_state(model)",
    stage="model",
    needs="parts",
    when=lambda method, known: next(iter(known.parts.perhaps_buffers), ""),
)

ServerStep.checks = (
    Problem(
        "large-server-steps",
        "Or the server's steps are too large: {found}",
        effect="remedy",
        stage="diverged",
        when=_server_rate,
    ),
    STEPPED_BUFFERS,
)
