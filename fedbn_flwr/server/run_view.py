"""The properties of a strategy that read its run."""

from __future__ import annotations

from typing import Any
from weakref import proxy

from flwr.app import ArrayRecord

from fedbn_flwr.batchnorm.parts import Parts
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.messages.protocol import Continuity
from fedbn_flwr.server.methods.together import Methods
from fedbn_flwr.server.rounds import testing
from fedbn_flwr.server.runs.protection import Protection
from fedbn_flwr.server.runs.round_outcome import RoundOutcome
from fedbn_flwr.server.runs.run_state import Run

__all__ = ["RunView"]


class RunView:
    """The properties of a strategy that read its run.

    Attributes:
        methods: the options and methods in use.
        protection: the protection of the replies.
        name: the name of the strategy.
        completes_tests: see ``Strategy``.
    """

    _run: Run
    methods: Methods
    protection: Protection
    name: str
    completes_tests: bool

    @property
    def run(self) -> Run:
        """The state of the run. It reads Flower's arguments from this strategy."""
        # A copied strategy has a run that refers to the original, so set the reference
        # at each access. It is weak, because a strong reference would keep the models
        # in memory until the next garbage collection.
        self._run.options = proxy(self)
        return self._run

    @property
    def reports(self) -> list[RoundOutcome]:
        """The report of each round, oldest first."""
        return self.run.reports

    @property
    def state(self) -> Any:
        """The method's state as a value, such as ``FixBN().state.frozen_after``.

        With several methods, it is a mapping by name.
        """
        names = self.name.split("+")
        if len(names) == 1:
            return self.run.states.get(self.name)
        return {name: self.run.states.get(name) for name in names}

    @property
    def parts(self) -> Parts | None:
        """The split of the model's state, or None if it is still unknown."""
        return self.run.start.parts_or_none

    @parts.setter
    def parts(self, parts: Parts | None) -> None:
        if parts and parts.personal and not self.methods.params.personal:
            raise ConfigError(
                f"strategy.parts has the personal entry '{parts.personal[0]}', but the"
                " strategy was made without personal entries, and would share it. Pass"
                " parts= or personal= to the constructor"
            )
        self.run.start.parts_or_none = parts
        self.run.start.shapes = {}  # of the next model, which is checked with this split

    @property
    def continuity(self) -> Continuity | None:
        """The id of the run for clients with a state folder, or None if not sent."""
        return self.run.start.continuity

    @continuity.setter
    def continuity(self, continuity: Continuity | None) -> None:
        self.run.start.continuity = continuity

    def advice(self, server_round: int) -> list[str]:
        """Return the causes and the remedies of a non-finite loss in this round."""
        return self.methods.advice(
            self.run.states, server_round, self.run.start.parts_or_none
        )

    def for_evaluate_fn(self, server_round: int, arrays: ArrayRecord) -> ArrayRecord:
        """Return the model for a round's test, with averaged BN if configured."""
        if not self.completes_tests:
            return testing.completed(self.run, arrays, averaged=False)
        return testing.tested_by_server(self.run, server_round, arrays)

    def outcome(self, num_rounds: int) -> dict[str, Any]:
        """Return the summary's entries about the methods and the protection."""
        return {
            **self.methods.outcome(self.run.states, num_rounds),
            **self.protection.outcome(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values and arrays."""
        return self.run.saved()
