"""What makes a method: its name, its settings, and the hooks that the server calls."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

from fedbn_flwr.batchnorm.averaging import State
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.server.metrics import average_metrics
from fedbn_flwr.server.replies import Reply
from fedbn_flwr.training.loop import ClientHook

__all__ = ["Method"]


class Method(FlowerFedAvg):
    """The interface between a method and ``strategies.server``, which calls the hooks in the order they stand here.

    ``FedAvg`` writes all of them; a method overrides those in which it differs.

    Attributes:
        name: in configs and messages.
        summary_line: what the tables say of it.
        source: its paper.
        local: the parts of the state that stay with the clients.
        implicit_hooks: client rules whose word is not needed: what they do shows in the reply, or a client may leave it.
        needs_batchnorm: whether it makes no sense without.
        gathers: whether the method itself tests with gathered statistics.
        Params: its settings, a frozen dataclass; the fields are constructor arguments.
        rules: its client halves: what makes each from the config of a training message.
        checkpoint_keys: the attributes that outlive a round, beside those of its bases.
        params: the settings.
    """

    name: ClassVar[str]
    summary_line: ClassVar[str]
    source: ClassVar[str]
    local: ClassVar[frozenset[Part]] = frozenset()
    implicit_hooks: ClassVar[frozenset[str]] = frozenset()
    needs_batchnorm: ClassVar[bool] = False
    gathers: ClassVar[bool] = False
    Params: ClassVar[type[Any]]
    rules: ClassVar[Mapping[str, Callable[[Mapping[str, Any]], ClientHook]]] = {}
    checkpoint_keys: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        fields = {field.name for field in dataclasses.fields(self.Params)}
        settings = {key: kwargs.pop(key) for key in fields & kwargs.keys()}
        try:
            super().__init__(*args, **kwargs)
        except TypeError as error:
            allowed = ", ".join(sorted(fields))
            message = f"{type(self).__name__}: {error}. Beside Flower's own arguments it takes: {allowed}, parts."
            raise ConfigError(message) from error
        if self.train_metrics_aggr_fn is aggregate_metricrecords:
            self.train_metrics_aggr_fn = average_metrics
        if self.evaluate_metrics_aggr_fn is aggregate_metricrecords:
            self.evaluate_metrics_aggr_fn = average_metrics
        self.params: Any = self.Params(**settings)
        self._tests = [name.strip() for name in self.params.eval_on.split(",")]
        self.check_tests(self._tests, self.params.recalibrate)

    @classmethod
    @abstractmethod
    def check_tests(cls, tests: Sequence[str], recalibrate: bool = False) -> None:
        """Refuse, with a ConfigError, tests this method has no model for."""

    @abstractmethod
    def begin(self) -> None:
        """Check the settings against the run (``num_rounds``, ``parts``) and forget an earlier run."""

    @abstractmethod
    def phase(self, server_round: int) -> str:
        """Return the name of the method's phase in this round."""

    @abstractmethod
    def client_config(self, server_round: int) -> dict[str, Any]:
        """Return what the method tells its clients in this round; ``rules`` names the client rules to apply."""

    @abstractmethod
    def extras(self, server_round: int) -> Mapping[str, State]:
        """Return what goes to the clients beside the model, by record; a client may answer in these records alone."""

    @abstractmethod
    def check(self, server_round: int, reply: Reply, before: State) -> None:
        """Refuse a reply that breaks the method's own law, with a ReplyError."""

    @abstractmethod
    def combine(self, server_round: int, replies: Sequence[Reply], before: State) -> dict[str, Any]:
        """Return the new global state from the round's replies (in order of partition id) and the state before."""
