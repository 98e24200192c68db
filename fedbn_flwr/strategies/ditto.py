r"""Ditto: each client also trains a personal model near the global model.

Li et al. 2021, "Ditto: Fair and Robust Federated Learning Through Personalization",
arXiv:2012.04221, Algorithm 1.

## When

Use when: each client needs its own model, and a global model is needed as well.

Not when: a client has no time or memory for two trainings.

## Problem

If clients differ, one model fits none of them well. But a client without the others has
few examples. Ditto trains a model for each client and pulls it towards the global
model.

## Algorithm

Client $k$ receives $w^t$ and trains two models with the same number of steps: $w$ as in
FedAvg, and its own model

$$v_k \leftarrow v_k - \eta \left( \nabla F_k(v_k) + \lambda (v_k - w^t) \right)$$

$\lambda$ is `proximal_mu`. $v_k$ includes BatchNorm's statistics. It starts as the first
$w^t$ that the client receives and stays with the client. The client's tests
(`eval-on=personal-own`) use it.

## Differs from the paper

The weights are $p_i$; the authors' code (litian96/ditto) gives the drawn clients equal
weights. In their code, $v_k$ starts as the first model of the run; here $v_k$ starts as
the model of the client's first round. The paper has no momentum; here the momentum
restarts in each round. Both trainings of a round see the same batches, as in the
authors' code. `agc` clips in both trainings. Other methods, such as FixBN, change only
the training of $w$.

## Law

$w$ equals FedAvg's model, bit for bit. With $\lambda = 0$, $v_k$ equals Standalone's
model.
"""

from __future__ import annotations

from torch import nn

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.problems import Problem
from fedbn_flwr.server.methods.method import Ask, Facts
from fedbn_flwr.server.methods.options import AGC, ClipGradients
from fedbn_flwr.server.methods.params import setting
from fedbn_flwr.server.methods.phases import Phase
from fedbn_flwr.server.strategy import Strategy
from fedbn_flwr.strategies.fedprox import (
    LARGE_MU,
    PROXIMAL_MU,
    FedProxMethod,
    FedProxParams,
    ProximalTerm,
)
from fedbn_flwr.training.client_hook import OWN_MODEL, ClientHook, Entries, Extras
from fedbn_flwr.training.model_state import load_state
from fedbn_flwr.transport.hook_context import HookContext


class DittoParams(FedProxParams):
    """Parameters of Ditto. Flower has no Ditto."""

    proximal_mu: float = setting(0.01, "mu >= 0 of the proximal term", ge=0)


class PersonalModel(ClientHook):
    """Client code that trains v_k before w."""

    kept_as = OWN_MODEL

    def __init__(self, strength: float, context: HookContext) -> None:
        if context.train is None or context.second_model is None:
            raise ConfigError(
                "ditto trains a second model: it needs a TorchClient",
                code="second-model-in-a-loop",
            )
        self._strength, self._train = strength, context.train
        self._second_model = context.second_model
        # An option acts in every step of a client; other methods act only in the steps
        # of w.
        self._clipping = float(context.config.get(AGC, 0.0))
        self._own: Entries = {}

    def receive(self, sent: Extras, kept: Entries) -> None:
        """Take v_k of the last round."""
        self._own = kept

    def begin(self, model: nn.Module) -> None:
        """Train v_k with a proximal term towards the received model."""
        received = [parameter.detach().clone() for parameter in model.parameters()]
        hooks: dict[str, ClientHook] = {
            "proximal": ProximalTerm(self._strength, received)
        }
        if self._clipping:
            hooks["agc"] = ClipGradients(self._clipping)
        with self._second_model() as (personal, task):
            if self._own:
                load_state(personal, self._own)
            self._train(personal, task=task, hooks=hooks)
            # The second model may be the first one, or serve a later message.
            state = personal.state_dict()
            self._own = {name: entry.clone() for name, entry in state.items()}

    def keep(self) -> Entries:
        """Return v_k."""
        return self._own


class DittoMethod(FedProxMethod[DittoParams]):
    """FedAvg with an additional personal model for each client."""

    name = "ditto"
    summary_line = "FedAvg, and a personal model per client near the global model"
    source = "Li 2021, arXiv:2012.04221"
    Params = DittoParams
    client_hooks = {
        "personal-model": lambda context: PersonalModel(
            float(context.config[PROXIMAL_MU]), context
        )
    }

    def phases(self) -> tuple[Phase, ...]:
        """Return a phase that keeps the personal model on the client."""
        return (Phase(keeps="the personal model", second_model=True),)

    def on_clients(self, state: None, facts: Facts) -> list[Ask]:
        """Send lambda."""
        return [Ask("personal-model", {PROXIMAL_MU: self.params.proximal_mu})]


class Ditto(Strategy):
    """FedAvg with an additional personal model for each client.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import Ditto
        >>> strategy = Ditto(proximal_mu=0.1)
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> result.evaluate_metrics_clientapp[2]["examples-tested"]  # own models
        48
    """

    method = DittoMethod


# --- what may be wrong ----------------------------------------------------------------
ALONE = Problem(
    "models-alone",
    "{method.title}: with proximal-mu=0, each client trains its personal model"
    " independently, just as standalone does. Use a proximal-mu above 0, such as 0.01.",
    "proximal_mu",
    effect="warn",
    when=lambda method, known: method.params.proximal_mu == 0,
)
DittoMethod.checks = (LARGE_MU, ALONE)
