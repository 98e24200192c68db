"""Texts in a run's files that describe the saved model and the versions.

The metadata of ``model.safetensors`` contain the description of the model, so that the
model can be used without the data of the run.
"""

from __future__ import annotations

import functools
import json
import platform
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fedbn_flwr.batchnorm.array_types import State
from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.client.kept import Folder, find, own_entries
from fedbn_flwr.client.personal_model import ABSENT, AVERAGED
from fedbn_flwr.errors import StateError
from fedbn_flwr.lab.config import STATE_IN_OUT, Config, data_of, state_in_out
from fedbn_flwr.lab.data import Dataset
from fedbn_flwr.lab.data.samples import per_channel
from fedbn_flwr.lab.models import build_model, code_changed, code_sha256
from fedbn_flwr.lab.models.normalise import Normalise
from fedbn_flwr.lab.objects_of_config import build_options
from fedbn_flwr.messages.versions import own_versions
from fedbn_flwr.server.methods.shared_bn import SHARED_BN
from fedbn_flwr.strategies import Strategy


def contents_of_model(strategy: Strategy) -> dict[str, str]:
    """Return the origin of each part of the entries in ``model.safetensors``.

    The texts are for the metadata of the file, such as "global".
    """
    about = {part.value: "global" for part in Part}
    # The file has no entries that clients keep, except their average if there is one.
    averaged = strategy.run.completing_entries(SHARED_BN)
    kept = {
        part for part in strategy.methods.local if strategy.run.parts.select([part])
    }
    about |= dict.fromkeys(kept, AVERAGED if averaged else ABSENT)
    if strategy.methods.reestimates and strategy.run.reestimated:
        about[Part.STATISTICS.value] = (
            "re-estimated from the clients' data under these weights"
        )
        # The model is complete with re-estimated statistics and initial counters.
        if about[Part.COUNTERS.value] == ABSENT:
            about[Part.COUNTERS.value] = "initial values"
    return about


def kept_by_clients(config: Config, strategy: Strategy) -> Iterator[tuple[str, State]]:
    """Yield (client, local entries) of each client whose entries are on this disk."""
    for client, content in kept_contents(config, strategy):
        own = own_entries(content)
        if own:
            yield client, own


def kept_contents(
    config: Config, strategy: Strategy
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (client, content of its state file) if the file is on this disk."""
    if strategy.continuity is None or not config.state_dir:
        return
    root = Path(config.state_dir)
    if config.state_dir == STATE_IN_OUT:
        root = state_in_out(config)
    # Look up the content by the hash that the server saw last, because a folder may
    # also contain the content of other rounds.
    for client, sha256 in strategy.run.kept.hashes.items():
        folder = Folder(root, strategy.continuity.run, int(client))
        name = find(folder, sha256)
        if name:
            yield client, folder.read(name)


def versions() -> dict[str, str]:
    """Return the versions of the packages that a result depends on.

    If fedbn-flwr runs from a checkout, its version also names the commit, such as
    0.1.0+g1a2b3c4 or 0.1.0+g1a2b3c4.changed.
    """
    others = ("torchvision", "numpy", "ray", "flwr-datasets")
    installed = {"python": platform.python_version(), **own_versions(*others)}
    installed["fedbn-flwr"] += commit_of(Path(__file__).parents[2])
    return installed


@functools.cache
def commit_of(package: Path) -> str:
    """Return "+g" and the commit of a package's checkout, or "" without a checkout.

    ".changed" is added if the package's files differ from the commit.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        # Fail if git does not track this file: the package may be installed in a folder
        # of another project's repository.
        git("ls-files", "--error-unmatch", "__init__.py")
        commit = git("rev-parse", "--short=7", "HEAD")
        changed = git("status", "--porcelain", "--", ".")
    except (OSError, subprocess.SubprocessError):
        return ""
    return f"+g{commit}.changed" if changed else f"+g{commit}"


MODEL_DESCRIPTION = "interface"
"""The key of the description, JSON, in the metadata of ``model.safetensors``."""

_BYTES = 255.0


@dataclass(frozen=True)
class ModelDescription:
    """A model and its inputs.

    Inputs become (x / scale - mean) / std by channel.

    Attributes:
        build: the arguments of ``build_model``.
        task: the name of the learning task.
        num_classes: classes, labels or target columns of the run's data; the model may
            have more outputs.
        shape: shape of an input, (C, H, W) for images, (C,) for rows.
        mean: mean of the training data after the division by ``scale``; () if inputs
            are used unchanged.
        std: standard deviation, in the same way.
        scale: 255 for pixels 0..255, 1 for other numbers. NaN among other numbers
            becomes the mean.
        classes: names of the classes 0, 1, ...; () without names.
        code: ``code_sha256`` of the model.
    """

    build: Mapping[str, Any]
    task: str
    num_classes: int
    shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = _BYTES
    classes: tuple[str, ...] = ()
    code: str = ""

    @classmethod
    def of(cls, config: Config, data: Dataset | None) -> ModelDescription:
        """Return the description of a run, from the config if ``data`` is None."""
        shape, info = data_of(config).shape, data_of(config).info
        if data:
            mean, std, as_bytes = data.mean, data.std, data.test.as_bytes
        else:
            # Adjust mean and std to the number of channels that the model takes, as the
            # loading of data does.
            mean = per_channel(info.mean, shape[0])
            std = per_channel(info.std, shape[0])
            as_bytes = not info.input_shape
        return cls(
            build=build_options(config),
            task=data_of(config).task.name,
            num_classes=info.num_classes,
            shape=shape,
            mean=mean,
            std=std,
            scale=_BYTES if as_bytes else 1.0,
            classes=info.class_names,
            code=code_sha256(config.model),
        )

    @classmethod
    def read(cls, about: Mapping[str, str]) -> ModelDescription:
        """Return the description in the metadata of a saved or exported model.

        Raises:
            StateError: the file has no description.
        """
        if MODEL_DESCRIPTION not in about:
            raise StateError(
                "the file has no description of its model, so it was not written by a"
                " run of this version."
            )
        values: dict[str, Any] = json.loads(about[MODEL_DESCRIPTION])
        for key, value in values.items():
            if isinstance(value, list):
                values[key] = tuple(value)
        return cls(**values)

    @property
    def as_bytes(self) -> bool:
        """Whether inputs are images, pixels 0..255."""
        return self.scale == _BYTES

    def code_changed(self) -> str:
        """Return a sentence if the file of a user's model changed since the run, or ""."""
        return code_changed(str(self.build["name"]), self.code)

    def to_json(self) -> str:
        """Return this description as JSON, for the metadata of a file."""
        return json.dumps(asdict(self))

    def model(self) -> nn.Module:
        """Return the model with its initial weights."""
        return build_model(**self.build)

    def normalise(self) -> Normalise:
        """Return the layer that normalises inputs."""
        return Normalise(self.mean, self.std, self.scale, len(self.shape) - 1)
