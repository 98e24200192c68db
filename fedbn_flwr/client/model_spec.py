"""The names, order and shapes of a model's entries, for the mod without a model.

The first message of a run contains the whole model. The mod keeps its spec in
``Context.state`` and in the node's state folder, if there is one, so that a restarted
node can complete the model again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context

from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.checked_file import read_checked, write_checked
from fedbn_flwr.client.kept import KeptState, state_dir
from fedbn_flwr.client.kept_files import partition_folder
from fedbn_flwr.errors import StateError
from fedbn_flwr.messages.protocol import (
    MODEL_SPEC,
    SPEC_SHAPES,
    Continuity,
    partition_of,
)
from fedbn_flwr.messages.records import of_kind

_FILE = "model.safetensors"


@dataclass(frozen=True)
class StateLocation:
    """The place of a node's local state on disk."""

    root: Path
    continuity: Continuity
    partition_id: int

    @classmethod
    def of(
        cls, context: Context, continuity: Continuity | None
    ) -> StateLocation | None:
        """Return the location, or None if there is none.

        The node or the run must name a ``state-dir``, and the server must send the
        ``continuity`` of its run.

        Raises:
            ConfigError: the folder is not absolute, or the partition id is not a
                number.
            StateError: the node has no partition id.
        """
        if continuity is None:
            return None
        root = state_dir(context)
        if root is None:
            return None
        partition_id = partition_of(context)
        if partition_id is None:
            raise StateError(
                "state-dir needs a partition id: give the SuperNode one in"
                " --node-config"
            )
        return cls(root, continuity, partition_id)

    @property
    def path(self) -> Path:
        """The file of the model's spec."""
        return partition_folder(self.root, self.continuity, self.partition_id) / _FILE


@dataclass(frozen=True)
class ModelSpec:
    """The shapes of the whole model's entries by name, in the server's order."""

    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, whole: Mapping[str, Any]) -> ModelSpec:
        """Return the spec of a whole model."""
        return cls({name: tuple(array.shape) for name, array in whole.items()})

    def save(self, context: Context, location: StateLocation | None) -> None:
        """Write the spec to the context, and to disk if there is a location.

        Raises:
            StateError: the state folder cannot be written.
        """
        shapes = {name: list(shape) for name, shape in self.shapes.items()}
        content = {"shapes": shapes}
        context.state[MODEL_SPEC] = ConfigRecord({SPEC_SHAPES: json.dumps(content)})
        # Flower's context ends with the process of the node, but a file in the folder
        # remains.
        if location is not None:
            try:
                location.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                write_checked(location.path, content)
            except OSError as error:
                raise StateError(
                    f"state folder {location.path.parent} cannot be written: {error}"
                ) from error

    @classmethod
    def load(cls, context: Context, location: StateLocation | None) -> ModelSpec | None:
        """Return the saved spec, or None if it is missing or cannot be read."""
        content: dict[str, Any] | None = None
        if MODEL_SPEC in context.state:
            content = json.loads(
                str(of_kind(context.state, ConfigRecord)[MODEL_SPEC][SPEC_SHAPES])
            )
        elif location is not None:
            # If the file is missing or damaged, the client reports this and receives
            # the whole model.
            with suppress(StateError):
                content = read_checked(location.path)
        if content is None:
            return None
        return cls({name: tuple(shape) for name, shape in content["shapes"].items()})

    def store(
        self, context: Context, location: StateLocation | None, start_id: str | None
    ) -> KeptState:
        """Return the local state of a model with this spec."""
        parts = split_state(self.shapes)
        store = KeptState(context, parts, parts.fingerprint(self.shapes), start_id)
        if location is not None:
            store.attach(location.root, location.continuity, location.partition_id)
        return store
