"""What makes a method: its name, its settings, and the hooks that the server calls."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, get_args

from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from typing_extensions import TypeVar

from fedbn_flwr.batchnorm.averaging import State, Variance
from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.compat.flower import is_default_aggregation
from fedbn_flwr.errors import ConfigError, unknown_name
from fedbn_flwr.messages.protocol import Key
from fedbn_flwr.server.metrics import average_metrics
from fedbn_flwr.server.momentum import MomentumScope
from fedbn_flwr.server.replies import Reply
from fedbn_flwr.training.loop import ClientHook
from fedbn_flwr.transport import Reducer

__all__ = ["HookContext", "HookFactory", "Method", "Params", "RunSettings", "limits", "setting"]


def setting(default: Any, meaning: str, group: str = "methods", **limits: Any) -> Any:
    """Return a field of ``Params``: its default, its meaning and its limits (``ge``, ``gt``, ``le``, ``lt``).

    The config key, its default in ``[tool.flwr.app.config]`` and its row in the documentation are made from the field.
    ``group`` is the group of keys that it stands in.
    """
    return Field(default, description=meaning, json_schema_extra={"group": group}, **limits)


class Params(BaseModel):
    """The settings of a method: frozen, and checked when they are made. Each field is a ``setting``.

    Those that stand here every strategy has; a method adds its own.

    Raises:
        ConfigError: every value that is out of range, by name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    variance: Variance = setting("mean", "average of running variances; pooled adds the spread of the client means")
    recalibrate: bool = setting(
        False,
        "every test and the saved model take BN statistics that are re-estimated from the clients' data (as staticbn "
        "does); training does not see them. eval-on=recalibrated tests so and saves the model as trained",
    )
    min_replies: int = setting(1, "usable replies below which a round keeps the previous model", "rounds", ge=1)
    eval_every: int = setting(1, "evaluate every so many rounds, and after the last", "rounds", ge=1)
    eval_on: str = setting(
        "",
        "comma list of tests; empty = global, or personal-own where parts are local. averaged-bn: clients of fedbn, "
        "silobn, mtfl share their BN parts, whose average completes the global model, saved so. recalibrated: the "
        "global model with re-estimated statistics (see recalibrate), beside the plain one",
        "rounds",
    )
    seed: int = setting(0, "seed of every random draw of the run", "rounds", ge=0)
    momentum_scope: MomentumScope = setting(
        "none", "SGD's momentum between rounds: forgotten, kept by the client, or averaged", "local training"
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = {problem["loc"][:1]: problem for problem in reversed(error.errors())}  # of a union: one is enough
            raise ConfigError("\n".join(map(self._problem, reversed(first.values())))) from error

    @classmethod
    def _problem(cls, problem: Any) -> str:
        """Return pydantic's problem in plain words: the setting, its value, what is allowed."""
        name, value = str(problem["loc"][0]), problem["input"]
        if problem["type"] == "literal_error":
            return str(unknown_name(name, value, get_args(cls.model_fields[name].annotation)))
        if problem["type"] == "value_error":
            return f"{name}={value!r}: {problem['ctx']['error']}"
        allowed = limits(cls.model_fields[name])
        if allowed and isinstance(value, (int, float)):
            return f"{name}={value!r} must be {allowed}"
        return f"{name}={value!r}: {problem['msg'].lower()}"


def limits(field: FieldInfo) -> str:
    """Return the numbers that a field allows, in words; "" where there is no limit."""
    signs = ("ge", "gt", "le", "lt")
    found = {sign: getattr(limit, sign) for limit in field.metadata for sign in signs if hasattr(limit, sign)}
    if found.keys() >= {"ge", "lt"}:
        return f"in [{found['ge']}, {found['lt']})"
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    text = " and ".join(f"{words[sign]} {value}" for sign, value in found.items())
    return f"a finite number {text}" if text and field.annotation is float else text


@dataclass(frozen=True)
class RunSettings:
    """What a run is told beside the method's own settings, as far as a method may object to it.

    Attributes:
        num_rounds: R.
        norm: the normalisation of the model.
        sgd_momentum: momentum of the clients' SGD.
        tests: what is tested, the names of ``eval-on``.
    """

    num_rounds: int
    norm: str = "batch"
    sgd_momentum: float = 0.0
    tests: tuple[str, ...] = ()


@dataclass(frozen=True)
class HookContext:
    """What a client hook is made from.

    Attributes:
        config: the config of the training message; the keys of a method are declared in its file.
        local_entries: names of the entries that stay with this client.
        reducer: takes part in the exchanges of a step that travels in messages; None in every other round.
    """

    config: Mapping[str, Any]
    local_entries: frozenset[str] = frozenset()
    reducer: Reducer | None = None


HookFactory = Callable[[HookContext], ClientHook]
P = TypeVar("P", bound=Params, default=Params)


class Method(FlowerFedAvg, Generic[P]):
    """The interface between a method and ``server.flower``, which calls the hooks in the order they stand here.

    ``FedAvg`` writes all of them; a method overrides those in which it differs.

    Attributes:
        name: in configs and messages.
        summary_line: what the tables say of it.
        source: its paper.
        local: the parts of the state that stay with the clients.
        needs_batchnorm: whether it makes no sense without BatchNorm.
        reestimates: whether the method itself tests with re-estimated statistics.
        synchronises: whether a local step exchanges statistics between the clients.
        Params: the class of its settings; the fields are constructor arguments.
        client_hooks: its client halves: what makes each of them, by name.
        implicit_hooks: client hooks that need no word from the client: what they do shows in the reply, or a client may
            leave them out.
        keys: what it sends beside the keys of ``messages.protocol``.
        checkpoint_keys: the attributes to checkpoint, beside those of its bases.
        params: the settings.
    """

    name: ClassVar[str]
    summary_line: ClassVar[str]
    source: ClassVar[str]
    local: ClassVar[frozenset[Part]] = frozenset()
    needs_batchnorm: ClassVar[bool] = False
    reestimates: ClassVar[bool] = False
    synchronises: ClassVar[bool] = False
    Params: ClassVar[type[Any]]
    client_hooks: ClassVar[Mapping[str, HookFactory]] = {}
    implicit_hooks: ClassVar[frozenset[str]] = frozenset()
    keys: ClassVar[tuple[Key, ...]] = ()
    checkpoint_keys: ClassVar[tuple[str, ...]] = ()

    params: P

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        fields = self.Params.model_fields
        settings = {key: kwargs.pop(key) for key in fields.keys() & kwargs.keys()}
        try:
            super().__init__(*args, **kwargs)
        except TypeError as error:
            allowed = ", ".join(sorted(fields))
            message = f"{type(self).__name__}: {error}. Beside Flower's own arguments it takes: {allowed}, parts."
            raise ConfigError(message) from error
        if is_default_aggregation(self.train_metrics_aggr_fn):
            self.train_metrics_aggr_fn = average_metrics
        if is_default_aggregation(self.evaluate_metrics_aggr_fn):
            self.evaluate_metrics_aggr_fn = average_metrics
        self.params = self.Params(**settings)

    @classmethod
    @abstractmethod
    def conflicts(cls, params: P, run: RunSettings) -> list[str]:
        """Return why these settings cannot be used in such a run, a line each, in the words of the config keys."""

    @classmethod
    @abstractmethod
    def exchange_cost(cls, params: P) -> tuple[int, int]:
        """Return what a synchronised BN layer costs beside the model: exchanges, and rows of its channels each way."""

    @classmethod
    @abstractmethod
    def extra_copies(cls, params: P) -> tuple[int, int]:
        """Return how often the trainable floats travel beside the model: of shared entries, and of all."""

    @classmethod
    def needs_all_at_once(cls, params: P) -> bool:
        """Return whether all clients of a round must run at the same time, each in a process of its own."""
        return False

    def outcome(self) -> dict[str, Any]:
        """Return what the summary of a finished run says of the method, by key."""
        return {}

    @abstractmethod
    def begin(self) -> None:
        """Check the settings against the run (``num_rounds``, ``parts``) and forget an earlier run."""

    @abstractmethod
    def phase(self, server_round: int) -> str:
        """Return the name of the method's phase in this round."""

    @abstractmethod
    def hooks_for(self, server_round: int) -> dict[str, dict[str, Any]]:
        """Return the client hooks to apply in this round, in order, each with what the clients are told for it."""

    @abstractmethod
    def extras(self, server_round: int) -> Mapping[str, State]:
        """Return what goes to the clients beside the model, by record; a client may answer in these records alone."""

    @abstractmethod
    def check(self, server_round: int, reply: Reply, before: State) -> None:
        """Refuse a reply that breaks the method's own law, with a ReplyError."""

    @abstractmethod
    def combine(self, server_round: int, replies: Sequence[Reply], before: State) -> dict[str, Any]:
        """Return the new global state from the round's replies (in order of partition id) and the state before."""
