"""What the mod must know of a model it never builds: entries, their order and shapes, and which of them stay here.

The server tells it with the common start. It lies in ``Context.state`` and, where the node has a state folder, beside
the part that is kept, so that a node that was restarted can put the model together again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context

from fedbn_flwr.errors import StateError
from fedbn_flwr.client.local_state import LocalState
from fedbn_flwr.checked_file import read_checked, write_checked
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.client.state_folder import Continuity, partition_folder, state_dir

__all__ = ["ModelSpec", "StateLocation"]

_KEY, _FILE = "fedbn-flwr.whole", "model.safetensors"


@dataclass(frozen=True)
class StateLocation:
    """Where a node's part is kept on disk: its state folder, the run it works for, its partition."""

    root: Path
    continuity: Continuity
    partition_id: int

    @classmethod
    def of(cls, context: Context, told: Mapping[str, Any]) -> StateLocation | None:
        """Return it where the node or the run names a ``state-dir`` and the server tells its series.

        Raises:
            ConfigError: the folder is not absolute.
            StateError: the node has no partition id.
        """
        if (continuity := Continuity.of(told)) is None:
            return None
        if (root := state_dir(context, str(context.run_config.get("state-dir", "")))) is None:
            return None
        if "partition-id" not in context.node_config:
            raise StateError("state-dir needs a partition id: give the SuperNode one in --node-config")
        return cls(root, continuity, int(context.node_config["partition-id"]))

    @property
    def path(self) -> Path:
        """The file of the frame."""
        return partition_folder(self.root, self.continuity, self.partition_id) / _FILE


@dataclass(frozen=True)
class ModelSpec:
    """The names and shapes of the whole model in the server's order, and the names of what stays with the client."""

    shapes: dict[str, tuple[int, ...]]
    local: tuple[str, ...] = ()

    @classmethod
    def of(cls, whole: ArrayRecord, local: Iterable[str] = ()) -> ModelSpec:
        """Return the frame of a whole model."""
        return cls({name: tuple(array.shape) for name, array in whole.items()}, tuple(local))

    def note(self, context: Context, home: StateLocation | None) -> None:
        """Write it down, on disk too where there is a home.

        Raises:
            StateError: the state folder cannot be written.
        """
        content = {"shapes": {name: list(shape) for name, shape in self.shapes.items()}, "local": list(self.local)}
        context.state[_KEY] = ConfigRecord({"frame": json.dumps(content)})
        if home is not None:
            try:
                home.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                write_checked(home.path, content)
            except OSError as error:
                raise StateError(f"state folder {home.path.parent} cannot be written: {error}") from error

    @classmethod
    def recall(cls, context: Context, home: StateLocation | None) -> ModelSpec | None:
        """Return what was noted; None where nothing was, or it cannot be read."""
        content: dict[str, Any] | None = None
        if _KEY in context.state:
            content = json.loads(str(context.state.config_records[_KEY]["frame"]))
        elif home is not None:
            with suppress(StateError):
                content = read_checked(home.path)
        return content and cls({name: tuple(s) for name, s in content["shapes"].items()}, tuple(content["local"]))  # type: ignore[return-value]

    def store(self, context: Context, home: StateLocation | None) -> LocalState:
        """Return what is kept for a model of this frame."""
        like = {name: torch.empty(shape, device="meta") for name, shape in self.shapes.items()}
        store = LocalState(context, split_state(like), like)
        if home is not None:
            store.attach(home.root, home.continuity, home.partition_id)
        return store
