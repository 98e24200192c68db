"""The interface of a method: its name, its settings (``server.params``), and the hooks that the server calls."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, Generic, Literal, NamedTuple

from flwr.app import Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from torch import nn
from typing_extensions import TypeVar

from fedbn_flwr.batchnorm.averaging import State
from fedbn_flwr.batchnorm.parts import Part, Parts
from fedbn_flwr.compat.flower import is_default_aggregation
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.messages.protocol import Key
from fedbn_flwr.server.failures import TOO_LARGE_STEPS
from fedbn_flwr.server.metrics import average_metrics
from fedbn_flwr.server.params import Params, tests_in
from fedbn_flwr.server.replies import Reply
from fedbn_flwr.training.client_hook import ClientHook
from fedbn_flwr.transport import Reducer

__all__ = [
    "HookContext",
    "HookFactory",
    "Method",
    "Misfit",
    "Need",
    "Role",
    "RunSettings",
]


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run outside the method's ``Params`` that may conflict with the method.

    Attributes:
        num_rounds: R.
        norm: the normalisation of the model.
        sgd_momentum: momentum of the clients' SGD.
        optimizer: the clients' optimizer.
        gradient_clip_norm: largest norm of a client's gradient; 0 = any.
        tests: the tests of ``eval-on`` (``tests_in``).
    """

    num_rounds: int
    norm: str = "batch"
    sgd_momentum: float = 0.0
    tests: tuple[str, ...] = ()
    optimizer: str = "sgd"
    gradient_clip_norm: float = 0.0


@dataclass(frozen=True)
class HookContext:
    """The input of a ``HookFactory``.

    Attributes:
        config: the config of the training message; the keys of a method are declared in its file.
        local_entries: names of the entries that stay with this client.
        reducer: the reducer of a synchronised step by messages; None otherwise.
        validation_loss: returns the loss of a model on the client's validation data; None if the training is a loop of
            another project. It raises DataError if the client has none.
    """

    config: Mapping[str, Any]
    local_entries: frozenset[str] = frozenset()
    reducer: Reducer | None = None
    validation_loss: Callable[[nn.Module], float] | None = None


class Need(NamedTuple):
    """The layers that a method or a setting needs: without them it has no effect.

    Attributes:
        who: the method or the setting.
        instead: what to use without such layers.
        parts: BatchNorm must have an entry in one of these parts; none = any BatchNorm.
    """

    who: str
    instead: str
    parts: frozenset[Part] = frozenset()


class Misfit(NamedTuple):
    """Why a model does not fit a method.

    Attributes:
        need: who needs what.
        has: what the model has; "" = no BatchNorm.
        remedy: what to use.
    """

    need: str
    has: str
    remedy: str


HookFactory = Callable[[HookContext], ClientHook]
Role = Literal["", "local-part", "client-hooks", "server-step"]
P = TypeVar("P", bound=Params, default=Params)


class Method(FlowerFedAvg, Generic[P]):
    """The interface between a method, a paper's algorithm, and ``server.flower``, which runs it as a strategy.

    Class methods check settings and need no run. ``begin`` is called once. In a round the server calls ``phase``,
    ``hooks_for``, ``extras``, ``run_training``, ``check`` for each reply, and ``combine``, which calls ``weights``.
    ``Server`` and ``CommonOptions`` implement all but ``weights`` and ``combine``, FedAvg implements these two; another
    method overrides those that differ.

    Attributes:
        name: the name in configs and messages.
        summary_line: the description in the tables.
        source: the paper.
        role: what the method adds to another one, and the config key for it; "" = it is not combined with others.
        not_combined_because: why the method is not combined with others; "" if it has a role.
        local: the parts of the state that stay with the clients.
        freezes_bn: whether the method freezes BN during the run.
        needs_batchnorm: whether the method is useless without BatchNorm.
        needs_statistics: whether the method needs BatchNorm's running statistics.
        batch_renorm_conflict: why the method cannot be used with norm=batch-renorm, after its name; "" if it can.
        reestimates: whether the method always tests with re-estimated statistics.
        needs_each_reply: whether the server needs more than the |D_i|-weighted average of the replies' arrays; a class
            that overrides ``combine``, ``weights`` or ``check`` and does not say so needs it.
        undoes_lost_rounds: whether a client whose reply is not used goes back to what it kept before that round.
        synchronises: whether a local step exchanges statistics between the clients.
        Params: the class of the settings; its fields are constructor arguments.
        client_hooks: factories of the client hooks, by name.
        implicit_hooks: client hooks that the reply need not name as applied: the reply shows their effect, or a client
            may leave them out; with those of the base classes.
        keys: message keys of the method that are not in ``messages.protocol``.
        checkpoint_keys: attributes to checkpoint, without those of the base classes.
        reported_metrics: metrics of the clients' training that a run's lines have, without those of the base classes.
        params: the settings.
        tests: the tests of ``eval_on`` (``tests_in``).
    """

    name: ClassVar[str]
    summary_line: ClassVar[str]
    source: ClassVar[str]
    role: ClassVar[Role] = ""
    not_combined_because: ClassVar[str] = ""
    local: ClassVar[frozenset[Part]] = frozenset()
    freezes_bn: ClassVar[bool] = False
    needs_batchnorm: ClassVar[bool] = False
    needs_statistics: ClassVar[bool] = False
    batch_renorm_conflict: ClassVar[str] = ""
    reestimates: ClassVar[bool] = False
    needs_each_reply: ClassVar[bool] = False
    undoes_lost_rounds: ClassVar[bool] = False
    synchronises: ClassVar[bool] = False
    Params: ClassVar[type[Any]]
    client_hooks: ClassVar[Mapping[str, HookFactory]] = {}
    implicit_hooks: ClassVar[frozenset[str]] = frozenset()
    keys: ClassVar[tuple[Key, ...]] = ()
    checkpoint_keys: ClassVar[tuple[str, ...]] = ()
    reported_metrics: ClassVar[tuple[str, ...]] = ()

    params: P

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        fields = self.Params.model_fields
        settings = {key: kwargs.pop(key) for key in fields.keys() & kwargs.keys()}
        try:
            super().__init__(*args, **kwargs)
        except TypeError as error:
            allowed = ", ".join([*sorted(fields), "on_round_end", "parts"])
            message = f"{type(self).__name__}: {error}. In addition to Flower's own arguments it takes: {allowed}."
            raise ConfigError(message) from error
        for name in ("fraction_train", "fraction_evaluate"):
            share = getattr(self, name)
            if not isinstance(share, Real) or not 0 <= float(share) <= 1:
                raise ConfigError(f"{type(self).__name__}: {name}={share!r} must be a number from 0 to 1")
        if is_default_aggregation(self.train_metrics_aggr_fn):
            self.train_metrics_aggr_fn = average_metrics
        if is_default_aggregation(self.evaluate_metrics_aggr_fn):
            self.evaluate_metrics_aggr_fn = average_metrics
        self.params = self.Params(**settings)
        self.tests = tests_in(self.params.eval_on)
        self._refuse_unused()

    def _refuse_unused(self) -> None:
        """Raise ConfigError for settings that were given, differ from their default, and have no effect."""
        run = RunSettings(0, tests=self.tests)
        fields = type(self.params).model_fields
        lines = [
            f"{name}={getattr(self.params, name)!r} has no effect: {use}"
            for name, use in self.unused(self.params, run).items()
            if name in fields and getattr(self.params, name) != fields[name].default
        ]
        if lines:
            raise ConfigError("\n".join(lines))

    @property
    def recalibrates(self) -> bool:
        """Whether every test and the final model use re-estimated statistics."""
        return self.reestimates or self.params.recalibrate

    @classmethod
    @abstractmethod
    def conflicts(cls, params: P, run: RunSettings) -> list[str]:
        """Return why these settings cannot be used in such a run: one line each, with the names of the config keys."""

    @classmethod
    def warnings(cls, params: P, run: RunSettings) -> list[str]:
        """Return what these settings do in such a run that a user may not expect: one line each."""
        return []

    @classmethod
    @abstractmethod
    def unused(cls, params: P, run: RunSettings) -> dict[str, str]:
        """Return the settings that have no effect under the other settings, by name, each with what it needs.

        They are fields of ``Params``, or config keys of local training (with ``_``).
        """

    @classmethod
    @abstractmethod
    def needs(cls, params: P) -> list[Need]:
        """Return the layers that the method and its settings need."""

    @classmethod
    @abstractmethod
    def misfits(cls, params: P, parts: Parts, shapes: Mapping[str, tuple[int, ...]]) -> list[Misfit]:
        """Return why a model with this split and these shapes does not fit; empty if it fits."""

    @classmethod
    def excludes(cls, other: type[Method[Any]]) -> str:
        """Return why this method cannot be combined with another one; "" if this method allows it."""
        if cls.not_combined_because or not cls.role:
            return cls.not_combined_because or f"{cls.name} is not combined with other methods"
        if cls.role == other.role and cls.role != "client-hooks":
            return f"a run has one {cls.role.replace('-', ' ')}"
        return ""

    @classmethod
    def exchange_cost(cls, params: P, gradient: bool = True) -> tuple[int, int]:
        """Return the additional cost of a synchronised BN layer: exchanges, and rows of its channels each way.

        ``gradient``: its input needs a gradient; that of a layer after a frozen network does not.
        """
        return 0, 0

    @classmethod
    @abstractmethod
    def extra_copies(cls, params: P) -> int:
        """Return how many extra copies of the shared trainable floats travel with the model, each way."""

    @classmethod
    def extra_statistics(cls, params: P) -> tuple[float, float]:
        """Return how many times the floats of the running statistics travel beside the model: down, and up.

        Up there is an integer per BN layer, too. Nothing goes down in the first round.
        """
        return 0.0, 0.0

    @classmethod
    def needs_all_at_once(cls, params: P) -> bool:
        """Return whether all clients of a round must run at the same time, each in a process of its own."""
        return False

    @abstractmethod
    def beside_updates(self) -> dict[str, str]:
        """Return what a client sends beside the update of the shared entries: kind -> reason, in words.

        Differential privacy refuses every kind. Masked sums accept ``exchanges``, ``buffers`` and ``statistics``, which
        they mask: use these names for such sums only.
        """

    def divergence_advice(self, server_round: int) -> list[str]:
        """Return the likely cause of a loss that is not finite in this round, with remedies; then further ones."""
        return [TOO_LARGE_STEPS]

    def stops_after(self, server_round: int) -> bool:
        """Return whether the run ends after this round, also if it is not the last; 0 = before the first."""
        return False

    def outcome(self, num_rounds: int) -> dict[str, Any]:
        """Return what the summary of a run says of the method after so many rounds, by key."""
        return {}

    @abstractmethod
    def begin(self) -> None:
        """Check the settings against the run (``num_rounds``, ``parts``) and reset the method's state."""

    def phase(self, server_round: int) -> str:
        """Return the name of the method's phase in this round."""
        return "train"

    @abstractmethod
    def hooks_for(self, server_round: int) -> dict[str, dict[str, Any]]:
        """Return the client hooks of this round, in order, each with its config entries."""

    @abstractmethod
    def extras(self, server_round: int) -> Mapping[str, State]:
        """Return the further records sent with the model; also those that clients only send up, with ``{}``.

        The codec of a ``NumPyClient`` puts arrays of other records into the model's.
        """

    @abstractmethod
    def run_training(self, server_round: int, messages: Iterable[Message], grid: Grid) -> list[Message]:
        """Send the training messages and return the replies; a synchronised step has its exchanges here."""

    @abstractmethod
    def weights(self, replies: Sequence[Reply]) -> list[float]:
        """Return a weight >= 0 for each reply, in their order; the weights p_i are these, normalised."""

    @abstractmethod
    def check(self, server_round: int, reply: Reply, before: State) -> None:
        """Raise ReplyError for a reply that breaks a rule of the method."""

    @abstractmethod
    def combine(self, server_round: int, replies: Sequence[Reply], before: State) -> dict[str, Any]:
        """Return the new global state, given the round's replies (in order of partition id) and the state before."""
