"""The state of a run: what the server knows of the model and of its clients, and what of that outlives a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from logging import WARNING
from typing import Any, ClassVar

from flwr.app import ArrayRecord, Message
from flwr.common import log

from fedbn_flwr.batchnorm.averaging import State
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.batchnorm.parts import Parts, split_state
from fedbn_flwr.client.state_folder import Continuity
from fedbn_flwr.server.method import Method
from fedbn_flwr.server.dispatch import Dispatcher
from fedbn_flwr.server.report import RoundReport
from fedbn_flwr.server.nodes import Node, NodeRegistry
from fedbn_flwr.server.shared_bn import LatestBN
from fedbn_flwr.messages.numpy_client import PROPERTIES

__all__ = ["RunState"]


class RunState(Method):
    """A method with the state of its run.

    Attributes:
        parts: the split of the model's state; None until the first arrays, where it was not given.
        num_rounds: of the run; None where a loop of Flower's keeps it to itself.
        reports: what happened, round by round.
        arrays: the global model, as training goes on with it; tests may complete it.
        num_able: nodes with training data, N of the papers.
        gathered: running statistics for the model after this round.
        latest_bn: what clients shared of their BN for tests.
        local_hashes: the SHA-256 of what each client keeps, by label.
        volatile: clients that keep something in memory alone.
        continuity: what clients are told of the run, for their state folders.
    """

    checkpoint_keys: ClassVar[tuple[str, ...]] = ("local_hashes", "volatile", "started", "gathered", "shared_bn")

    def __init__(self, *args: Any, parts: Parts | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parts = parts
        self.num_rounds: int | None = None
        self.reports: list[RoundReport] = []
        self.arrays = ArrayRecord()
        self.num_able = 0
        self.gathered: dict[str, Any] = {}
        self.latest_bn = LatestBN()
        self.local_hashes: dict[str, str] = {}
        self.volatile: list[str] = []
        self.continuity: Continuity | None = None
        self._before: State = {}
        self._rules_told: frozenset[str] = frozenset()
        self._saved: tuple[int, Mapping[str, Any]] | None = None
        self._begun = False
        self._post = self._new_post(3600.0)

    def prepare(self, initial_arrays: ArrayRecord, num_rounds: int | None, timeout: float) -> int:
        """Forget an earlier run and get ready for this one; ``start`` does this first.

        Args:
            initial_arrays: the common start.
            num_rounds: rounds of the run; None where a loop of Flower's keeps it to itself.
            timeout: seconds to wait for nodes and for replies.

        Returns:
            The round to go on after: 0, or the one given to ``load_state_dict``.

        Raises:
            ConfigError: settings that do not fit this run.
        """
        self.num_rounds, self.reports = num_rounds, []
        self.local_hashes, self.volatile = {}, []
        self._post = self._new_post(timeout)
        self._know(initial_arrays)
        self._begin()
        after = self._restore()
        if after is None:
            return 0
        self._post.owe(self.local_hashes)
        return after

    def state_dict(self) -> dict[str, Any]:
        """Return what outlives a round of a begun run beside the model: JSON values and arrays by attribute."""
        return {name: getattr(self, name) for name in self._checkpoint_keys()}

    def load_state_dict(self, state: Mapping[str, Any], server_round: int) -> None:
        """Let the next ``start`` go on after ``server_round`` with what ``state_dict`` returned then.

        Raises:
            ConfigError: it is the state of another method.
        """
        if set(state) != set(self._checkpoint_keys()):
            found, wanted = ", ".join(sorted(state)), ", ".join(sorted(self._checkpoint_keys()))
            raise ConfigError(f"the state of a strategy {self.name!r} holds {wanted}; this one holds {found}")
        self._saved = server_round, dict(state)

    def _restore(self) -> int | None:
        """Take over what ``load_state_dict`` was given; return the round to go on after, None for a new run."""
        if self._saved is None:
            return None
        (after, state), self._saved = self._saved, None
        for name, value in state.items():
            setattr(self, name, value)
        return after

    def _checkpoint_keys(self) -> list[str]:
        return [name for kind in reversed(type(self).__mro__) for name in vars(kind).get("checkpoint_keys", ())]

    @property
    def total_rounds(self) -> int:
        """The number of rounds of the run; ConfigError where the loop that runs them keeps it to itself."""
        if self.num_rounds is None:
            raise ConfigError(
                f"strategy {self.name!r} needs the number of rounds, which is not known where its own start() is not "
                "called: give it rounds (int), not fractions; in Flower's legacy loop pass num_rounds= to to_legacy."
            )
        return self.num_rounds

    @property
    def _known_parts(self) -> Parts:
        if self.parts is None:
            raise ConfigError(
                "the split of the state is not known before the first arrays; pass parts=split_state(model)"
            )
        return self.parts

    @property
    def started(self) -> list[str]:
        """The clients that have had the common start, by label."""
        return self._post.roster.initialised_labels

    @started.setter
    def started(self, labels: Sequence[str]) -> None:
        self._post.roster.expect_initialised(labels)

    @property
    def shared_bn(self) -> list[Any]:
        """What clients shared of their BN for tests, as a tree."""
        return self.latest_bn.tree

    @shared_bn.setter
    def shared_bn(self, tree: Sequence[Any]) -> None:
        self.latest_bn = LatestBN(tree)

    def _new_post(self, timeout: float) -> Dispatcher:
        return Dispatcher(NodeRegistry(self.params.seed, timeout), timeout, self.arrayrecord_key, self.configrecord_key)

    def _know(self, arrays: ArrayRecord) -> None:
        if self.parts is None:
            self.parts = split_state(arrays)
        if unknown := [name for name in arrays if name not in self.parts.part_of]:
            raise ConfigError(
                f"parts= does not know {len(unknown)} of the arrays ({unknown[0]}, ...): it was made from another model"
            )

    def _begin(self) -> None:
        self._begun, self.gathered, self.latest_bn = True, {}, LatestBN()
        self.begin()

    def _note_kept(self, node: Node, message: Message) -> None:
        """Note the hash of what the client keeps now, whether its reply is used or not, and whether it is durable."""
        properties = message.content.config_records.get(PROPERTIES) if message.has_content() else None
        if properties and "local-sha256" in properties:
            if "local-began" in properties and node.label in self.local_hashes:
                log(
                    WARNING,
                    "%s had lost what it kept between rounds (its memory went with its process), and began anew; "
                    "give it a state folder (state-dir)",
                    node,
                )
            self.local_hashes[node.label] = str(properties["local-sha256"])
            if (properties.get("local-home") != "folder") != (node.label in self.volatile):
                self.volatile = sorted({*self.volatile} ^ {node.label})
