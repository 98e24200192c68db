"""The options of every method, as methods that act before the others.

An option is used if its setting asks for it. The settings are fields of
``server.methods.params.Params``.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

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
from fedbn_flwr.server.methods.params import RECALIBRATED, Params, tests_in
from fedbn_flwr.server.methods.shared_bn import SHARED_BN, ShareBN
from fedbn_flwr.server.methods.travels import PERSONAL, Extra, Travels
from fedbn_flwr.training.client_hook import ClientHook
from fedbn_flwr.training.gradient_clipping import clip_gradients, exclude_head

AGC = "fedbn-flwr.agc"  # float: lambda

S = TypeVar("S", default=None)


class Option(Method[Params, S]):
    """An option of every method. ``name`` is the setting in the user's spelling."""

    role = "option"

    @staticmethod
    @abstractmethod
    def chosen(params: Any) -> bool:
        """Return whether the settings ask for the option."""


class MomentumScope(Option[Momentum]):
    """SGD's momentum between rounds, kept by the client or averaged by the server."""

    name = "momentum-scope"
    instead = "momentum-scope=none"
    State = Momentum
    client_hooks = {
        MOMENTUM: lambda context: MomentumBuffers(
            context.config[SCOPE], context.local_entries
        )
    }

    @staticmethod
    def chosen(params: Any) -> bool:
        """Return whether the momentum persists between rounds."""
        return bool(params.momentum_scope != "none")

    def travels(self, num_rounds: int | None = None) -> tuple[Travels, ...]:
        """Return a phase that declares the buffers that the server averages."""
        if self.params.momentum_scope == "local":
            return (Travels(kept="SGD's momentum"),)
        why = "momentum-scope=global sends SGD's momentum in addition to the model"
        buffers = Extra(MOMENTUM, "trainable", why, down=True, read="mean")
        return (Travels(extras=(buffers,)),)

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
        """Clip all gradients except those of the classifier's last layer."""
        # Find the head once per round, because the search takes as long as a step of a
        # small model.
        if self._head is None:
            self._head = exclude_head(model)
        clip_gradients(model.parameters(), self._clipping, exclude=self._head)


class AdaptiveClipping(Option):
    """Adaptive gradient clipping in every step."""

    name = "agc"
    instead = "agc=0"
    client_hooks = {"agc": lambda context: ClipGradients(float(context.config[AGC]))}

    @staticmethod
    def chosen(params: Any) -> bool:
        """Return whether gradients are clipped."""
        return bool(params.agc)

    def on_clients(self, state: None, facts: Facts) -> list[Ask]:
        """Send lambda."""
        return [Ask("agc", {AGC: self.params.agc}, tunes=True)]


class AveragedBN(Option):
    """Tests of a global model with the average of the clients' local BN parts."""

    name = "eval-on=averaged-bn"
    instead = "another eval-on"
    client_hooks = {"share-bn": lambda context: ShareBN(context.local_entries)}

    @staticmethod
    def chosen(params: Any) -> bool:
        """Return whether a test needs the average."""
        return SHARED_BN in tests_in(params.eval_on)

    def travels(self, num_rounds: int | None = None) -> tuple[Travels, ...]:
        """Return a phase that declares the copies that clients send."""
        why = f"eval-on={SHARED_BN} collects the BN parts that stay with the clients"
        return (Travels(extras=(Extra(SHARED_BN, "local", why, read="mean"),)),)

    def on_clients(self, state: None, facts: Facts) -> list[Ask]:
        """Request the copies. A client may leave them out."""
        # Use ``shown=True``: a training loop of another project does not report this
        # hook, but may train anyway.
        return [Ask("share-bn", shown=True)]


class PersonalEntries(Option):
    """Option that keeps the entries named by the user on the clients."""

    name = "personal"
    instead = "no personal entries"

    @staticmethod
    def chosen(params: Any) -> bool:
        """Return whether the user has named any entries."""
        return bool(params.personal)

    def travels(self, num_rounds: int | None = None) -> tuple[Travels, ...]:
        """Return a phase that keeps the personal entries on the client."""
        return (Travels(local=PERSONAL),)


class Recalibrate(Option):
    """Every test and the final model use re-estimated statistics."""

    name = "recalibrate=true"
    instead = "recalibrate=false"

    @staticmethod
    def chosen(params: Any) -> bool:
        """Return whether statistics are re-estimated."""
        return bool(params.recalibrate)

    def travels(self, num_rounds: int | None = None) -> tuple[Travels, ...]:
        """Return a phase that re-estimates the statistics before tests."""
        return (Travels(reestimates=True),)


class TestRecalibrated(Recalibrate):
    """A test with re-estimated statistics."""

    name = f"eval-on={RECALIBRATED}"
    instead = "another eval-on"

    @staticmethod
    def chosen(params: Any) -> bool:
        """Return whether the run has a test with re-estimated statistics."""
        return RECALIBRATED in tests_in(params.eval_on)


class CollectedClassMoments(Option):
    """Moments of BN's inputs for each class, for the calibration at new sites."""

    name = "class-moments=true"
    instead = "class-moments=false"

    @staticmethod
    def chosen(params: Any) -> bool:
        """Return whether the moments are collected."""
        return bool(params.class_moments)

    def travels(self, num_rounds: int | None = None) -> tuple[Travels, ...]:
        """Return a phase that collects the moments after the last round."""
        return (Travels(class_moments=True),)


class PooledVariance(Option):
    """The average of running variances, including the spread of the clients' means."""

    name = "variance=pooled"
    instead = "variance=mean"

    @staticmethod
    def chosen(params: Any) -> bool:
        """Return whether variances are pooled."""
        return bool(params.variance == "pooled")

    def travels(self, num_rounds: int | None = None) -> tuple[Travels, ...]:
        """Return a phase in which the server reads each client's statistics."""
        # The spread of the clients' means cannot be computed from their average.
        return (Travels(each=frozenset({Part.STATISTICS})),)


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


def chosen_options(params: Any) -> list[type[Option[Any]]]:
    """Return the options that the settings ask for."""
    return [kind for kind in OPTIONS if kind.chosen(params)]


# --- what may be wrong ----------------------------------------------------------------
MomentumScope.rows = (
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
        "momentum-scope={params.momentum_scope} needs sgd-momentum above 0",
        "sgd_momentum momentum_scope",
        needs="sgd_momentum",
        when=lambda method, known: (
            known.optimizer in (None, "sgd") and known.sgd_momentum == 0
        ),
    ),
)
