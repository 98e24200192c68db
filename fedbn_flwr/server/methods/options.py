"""The options of every method, as methods that act before the others.

An option is used if its setting requests the option. The settings are fields of
``server.methods.params.Params``.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn
from typing_extensions import TypeVar

from fedbn_flwr.batchnorm.averaging import to_shares
from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.problems import Problem
from fedbn_flwr.server.methods.method import (
    Ask,
    Facts,
    Method,
    Replies,
)
from fedbn_flwr.server.methods.momentum import (
    MOMENTUM,
    SCOPE,
    Momentum,
    MomentumBuffers,
)
from fedbn_flwr.server.methods.params import RECALIBRATED, Params
from fedbn_flwr.server.methods.phases import PERSONAL, Extra, Phase
from fedbn_flwr.server.methods.shared_bn import SHARED_BN, ShareBN
from fedbn_flwr.training.client_hook import ClientHook
from fedbn_flwr.training.gradient_clipping import clip_gradients, exclude_head

AGC = "fedbn-flwr.agc"  # float: lambda

S = TypeVar("S", default=None)


class Option(Method[Params, S]):
    """An option of every method. ``name`` is the setting in the user's spelling.

    Attributes:
        setting: the setting that selects it, by any value but the default.
        test: the test of ``eval_on`` that selects it instead.
    """

    role = "option"
    setting: ClassVar[str] = ""
    test: ClassVar[str] = ""


class MomentumScope(Option[Momentum]):
    """SGD's momentum between rounds, kept by the client or averaged by the server."""

    name = "momentum-scope"
    setting = "momentum_scope"
    instead = "momentum-scope=none"
    State = Momentum
    client_hooks = {
        MOMENTUM: lambda context: MomentumBuffers(
            context.config[SCOPE], context.local_entries
        )
    }

    def phases(self) -> tuple[Phase, ...]:
        """Return a phase that declares the buffers that the server averages."""
        if self.params.momentum_scope == "local":
            return (Phase(keeps="SGD's momentum"),)
        why = "momentum-scope=global sends SGD's momentum in addition to the model"
        buffers = Extra(MOMENTUM, "trainable", why, read="mean")
        return (Phase(extras=(buffers,)),)

    def on_clients(self, state: Momentum, facts: Facts) -> list[Ask]:
        """Send the scope, and the averaged buffers if the scope is "global"."""
        scope = self.params.momentum_scope
        # Kept buffers stay on the clients: the server does not have them.
        sends = {MOMENTUM: state.momentum} if scope == "global" else {}
        return [Ask(MOMENTUM, {SCOPE: scope}, sends)]

    def aggregate(
        self, state: Momentum, facts: Facts, replies: Replies, model: dict[str, Any]
    ) -> tuple[dict[str, Any], Momentum]:
        """Average the buffers with p_i, each entry over the replies that have it."""
        if self.params.momentum_scope != "global":
            return model, state
        return model, Momentum(replies.average_of(MOMENTUM, to_shares(replies.weights)))


class ClipGradients(ClientHook):
    """Client code for adaptive gradient clipping in every step."""

    def __init__(self, clipping: float) -> None:
        self._clipping = clipping
        self._head: tuple[nn.Parameter, ...] | None = None

    def gradients(self, model: nn.Module) -> None:
        """Clip all gradients except the gradients of the classifier's last layer."""
        # Find the head once per round, because the search takes as long as a step of a
        # small model.
        if self._head is None:
            self._head = exclude_head(model)
        clip_gradients(model.parameters(), self._clipping, exclude=self._head)


class AdaptiveClipping(Option):
    """Adaptive gradient clipping in every step."""

    name = "agc"
    setting = "agc"
    instead = "agc=0"
    client_hooks = {"agc": lambda context: ClipGradients(float(context.config[AGC]))}

    def on_clients(self, state: None, facts: Facts) -> list[Ask]:
        """Send lambda."""
        return [Ask("agc", {AGC: self.params.agc}, tunes=True)]


class AveragedBN(Option):
    """Tests of a global model with the average of the clients' local BN parts."""

    name = "eval-on=averaged-bn"
    test = SHARED_BN
    instead = "another eval-on"
    client_hooks = {"share-bn": lambda context: ShareBN(context.local_entries)}

    def phases(self) -> tuple[Phase, ...]:
        """Return a phase that declares the copies that clients send."""
        why = f"eval-on={SHARED_BN} collects the entries that stay with the clients"
        copies = Extra(SHARED_BN, "local", why, read="mean", instead=self.instead)
        return (Phase(extras=(copies,)),)

    def on_clients(self, state: None, facts: Facts) -> list[Ask]:
        """Request the copies. A client may leave them out."""
        # Use ``unnamed=True``: a training loop of another project does not report this
        # hook, but may train anyway.
        return [Ask("share-bn", unnamed=True)]


class PersonalEntries(Option):
    """Option that keeps the entries named by the user on the clients."""

    name = "personal"
    setting = "personal"
    instead = "no personal entries"

    def phases(self) -> tuple[Phase, ...]:
        """Return a phase that keeps the personal entries on the client."""
        return (Phase(local=PERSONAL),)


class Recalibrate(Option):
    """Every test and the final model use re-estimated statistics.

    The server pools them for global weights. A client with a model of its own measures
    them on its own data.
    """

    name = "recalibrate=true"
    setting = "recalibrate"
    instead = "recalibrate=false"

    def phases(self) -> tuple[Phase, ...]:
        """Return a phase that re-estimates the statistics before tests."""
        return (Phase(reestimates="tested"),)


class TestRecalibrated(Option):
    """A test of the global model with re-estimated statistics."""

    name = f"eval-on={RECALIBRATED}"
    test = RECALIBRATED
    instead = "another eval-on"

    def phases(self) -> tuple[Phase, ...]:
        """Return a phase that re-estimates the statistics with the global weights."""
        return (Phase(reestimates="global"),)


class CollectedClassMoments(Option):
    """Moments of BN's inputs for each class, for the calibration at new sites."""

    name = "class-moments=true"
    setting = "class_moments"
    instead = "class-moments=false"

    def phases(self) -> tuple[Phase, ...]:
        """Return a phase that collects the moments after the last round."""
        return (Phase(class_moments=True),)


class PooledVariance(Option):
    """The average of running variances, including the spread of the clients' means."""

    name = "variance=pooled"
    setting = "variance"
    instead = "variance=mean"

    def phases(self) -> tuple[Phase, ...]:
        """Return a phase that lets the server read each client's statistics."""
        # The spread of the clients' means cannot be computed from their average.
        return (Phase(each=frozenset({Part.STATISTICS})),)


OPTIONS: tuple[type[Option[Any]], ...] = (
    MomentumScope,
    AdaptiveClipping,
    AveragedBN,
    PersonalEntries,
    Recalibrate,
    TestRecalibrated,
    CollectedClassMoments,
    PooledVariance,
)
"""The options, in the order in which they act."""


# --- what may be wrong ----------------------------------------------------------------
MomentumScope.checks = (
    Problem(
        "momentum-without-sgd",
        "momentum-scope={params.momentum_scope} keeps SGD's momentum, but"
        " optimizer={known.optimizer} has none: its moments start at zero in each round",
        "optimizer momentum_scope",
        remedy="optimizer=sgd or momentum-scope=none",
        needs="optimizer",
        when=lambda method, known: known.optimizer != "sgd",
    ),
    Problem(
        "momentum-of-zero",
        "momentum-scope={params.momentum_scope} needs {known.its_momentum} above 0",
        "sgd_momentum momentum_scope",
        needs="sgd_momentum",
        when=lambda method, known: (
            known.optimizer in (None, "sgd") and known.sgd_momentum == 0
        ),
    ),
)
