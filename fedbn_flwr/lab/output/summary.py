"""What a summary says besides its numbers: the saved model's content, and versions."""

from __future__ import annotations

import functools
import platform
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from fedbn_flwr.batchnorm.averaging import State
from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.client.kept_files import KeptFiles
from fedbn_flwr.client.personal_model import ABSENT, AVERAGED
from fedbn_flwr.lab.config import STATE_IN_OUT, Config, state_in_out
from fedbn_flwr.messages.protocol import KEPT
from fedbn_flwr.server.methods.shared_bn import SHARED_BN
from fedbn_flwr.server.rounds.testing import completing_entries
from fedbn_flwr.strategies import Strategy

__all__ = [
    "CLIENTS",
    "HELD_OUT",
    "commit_of",
    "contents_of_model",
    "kept_by_clients",
    "versions",
]

HELD_OUT = "held-out"
"""The key of held-out clients' tests in ``metrics.jsonl``, and the prefix of means."""

CLIENTS = "-clients"  # ends the key with the number of clients that define a metric


def contents_of_model(strategy: Strategy | None) -> dict[str, str]:
    """Return the content of each part of ``model.safetensors``, for its metadata."""
    about = {part.value: "global" for part in Part}
    if strategy is None:
        return about
    # What clients keep is not in the file, but for an average of it.
    averaged = completing_entries(strategy.run, SHARED_BN)
    kept = {part for part in strategy.local if strategy.run.parts.select([part])}
    about |= dict.fromkeys(kept, AVERAGED if averaged else ABSENT)
    if strategy.methods.reestimates and strategy.run.reestimated:
        about[Part.STATISTICS.value] = (
            "re-estimated from the clients' data under these weights"
        )
        # a model with statistics is whole with them
        if about[Part.COUNTERS.value] == ABSENT:
            about[Part.COUNTERS.value] = "initial values"
    return about


def kept_by_clients(
    config: Config, strategy: Strategy, model: State
) -> Iterator[tuple[str, State]]:
    """Yield (client, entries) of each client whose part lies on this disk."""
    if not strategy.local or strategy.continuity is None or not config.state_dir:
        return
    shapes = {name: array.shape for name, array in model.items()}
    fingerprint = strategy.run.parts.fingerprint(shapes)
    root = Path(config.state_dir)
    if config.state_dir == STATE_IN_OUT:
        root = state_in_out(config)
    # By the hash that the server saw last: a folder may have other rounds, too.
    for client, sha256 in strategy.run.kept.hashes.items():
        folder = KeptFiles(root, strategy.continuity, int(client), fingerprint)
        content = folder.look_up(sha256)
        if content and KEPT in content["kept"]:
            yield client, content["kept"][KEPT]


def versions(*more: str) -> dict[str, str]:
    """Return the versions of the packages that a result depends on, and of ``more``.

    That of fedbn-flwr names the commit where it runs from a checkout, as 0.1.0+g1a2b3c4
    or 0.1.0+g1a2b3c4.changed.
    """
    names = (
        "fedbn-flwr",
        "flwr",
        "torch",
        "torchvision",
        "numpy",
        "ray",
        "flwr-datasets",
        *more,
    )
    installed = {"python": platform.python_version()}
    for name in names:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed[name] = "not installed"
    installed["fedbn-flwr"] += commit_of(Path(__file__).parents[2])
    return installed


@functools.cache
def commit_of(package: Path) -> str:
    """Return "+g" and the commit of a package that git tracks; "" elsewhere.

    With ".changed" if its files differ from it.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        # the folder may lie in a repository of something else
        git("ls-files", "--error-unmatch", "__init__.py")
        commit = git("rev-parse", "--short=7", "HEAD")
        changed = git("status", "--porcelain", "--", ".")
    except (OSError, subprocess.SubprocessError):
        return ""
    return f"+g{commit}.changed" if changed else f"+g{commit}"
