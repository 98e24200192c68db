"""What a summary says beside its numbers: what they are, what the saved model holds, and the versions."""

from __future__ import annotations

import functools
import platform
import subprocess
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from fedbn_flwr.batchnorm.averaging import State
from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.client.saved_state import ABSENT, AVERAGED
from fedbn_flwr.client.state_folder import StateFolder
from fedbn_flwr.lab.config import STATE_IN_OUT, Config, state_in_out
from fedbn_flwr.messages.protocol import KEPT, NUM_EXAMPLES, VALIDATION
from fedbn_flwr.server.params import TEST_BN
from fedbn_flwr.server.shared_bn import SHARED_BN
from fedbn_flwr.server.testing import completing_entries
from fedbn_flwr.strategies import Strategy

__all__ = ["CLIENTS", "HELD_OUT", "commit_of", "contents_of_model", "definitions", "kept_by_clients", "versions"]

HELD_OUT = "held-out"
"""The key of the tests of held-out clients in a line of ``metrics.jsonl``, and the prefix of the means over them."""

CLIENTS = "-clients"  # ends the key with the number of clients that define a metric
_OF_SOME = {
    "-weighted": "mean over the same clients as the plain mean, weighted by their {} examples",
    "-seen": "plain mean over the clients among them that have trained in this run",
    "-unseen": "plain mean over the clients among them that have not trained in this run",
    CLIENTS: "number of clients whose {} examples define the metric",
}
_TESTED_ON = {"own": "its own test set", "global": "the whole test set", VALIDATION: "its own validation examples"}


def definitions(
    final: Mapping[str, Any],
    line: Mapping[str, Any],
    num_tested: int,
    federated: bool,
    by: str = "",
    positive: str = "",
) -> dict[str, str]:
    """Return a sentence for each figure.

    Args:
        final: the figures by key.
        line: the line of ``metrics.jsonl`` that they come from.
        num_tested: number of examples of the whole test set.
        federated: there are clients.
        by: the BatchNorm statistics of tests that end in -test-bn.
        positive: the class that F1 and average precision are of, where there are two; "" = it has no name.
    """
    texts = {}
    for key in final:
        if key == "round":
            continue
        texts[key] = _definition(key, line, num_tested, federated)
        if positive and any(name in key for name in ("-f1", "-auprc", "-at-s")):
            texts[key] += f"; the positive class is {positive}"
        if f"{TEST_BN}-" in key:
            texts[key] += f"; BatchNorm has statistics of the test inputs ({by})"
    return texts


def _definition(key: str, line: Mapping[str, Any], num_tested: int, federated: bool) -> str:
    if key == "domains":
        return "each figure by domain: test-...: pooled over its test set, personal-...: plain mean over its clients"
    if key.startswith("train-"):
        return "mean over the clients, weighted by their training examples" if federated else "mean over the examples"
    if key.startswith("test-global-train-"):
        return "pooled over the training examples of all clients, without augmentation"
    if key.startswith("test-"):
        but = " but for the held-out clients' examples" if HELD_OUT in line else ""
        return f"pooled over the whole test set{but}, {num_tested} examples"
    if key == HELD_OUT:
        return "tests of each client that never trains, by name"
    if key.startswith(HELD_OUT) and not key.endswith(CLIENTS):
        return "plain mean over the clients that never train, where it is defined"
    if key.startswith(f"{VALIDATION}-"):
        return "pooled over the validation examples of all clients"
    name = key.split("-")[1]
    for ending, text in _OF_SOME.items():
        if key.endswith(ending):
            return text.format(VALIDATION if name == VALIDATION else "test")
    total = sum(client.get(f"{name}-{NUM_EXAMPLES}", 0) > 0 for client in line.get("clients", {}).values())
    defined = line.get(key + CLIENTS, total)
    who = f"{total} clients" if defined == total else f"{defined} of {total} clients (the others do not define it)"
    return f"plain mean over {who}, each on {_TESTED_ON[name]}"


def contents_of_model(strategy: Strategy | None) -> dict[str, str]:
    """Return the content of each part of ``model.safetensors``: its metadata, and ``model`` of the summary."""
    about = {part.value: "global" for part in Part}
    if strategy:
        averaged = completing_entries(strategy.run, SHARED_BN)
        kept = {part for part in strategy.local if strategy.run.parts.select([part])}
        about |= dict.fromkeys(kept, AVERAGED if averaged else ABSENT)
        if strategy.methods.reestimates and strategy.run.reestimated:
            about[Part.STATISTICS.value] = "re-estimated from the clients' data under these weights"
            if about[Part.COUNTERS.value] == ABSENT:
                about[Part.COUNTERS.value] = "initial values"  # a model with statistics is whole with them
    return about


def kept_by_clients(config: Config, strategy: Strategy, model: State) -> Iterator[tuple[str, State]]:
    """Yield (client, entries) of each client whose part lies on this disk, as the run left it."""
    if not strategy.local or strategy.continuity is None or not config.state_dir:
        return
    fingerprint = strategy.run.parts.fingerprint({name: array.shape for name, array in model.items()})
    root = state_in_out(config) if config.state_dir == STATE_IN_OUT else Path(config.state_dir)
    for client, sha256 in strategy.run.kept.hashes.items():
        folder = StateFolder(root, strategy.continuity, int(client), fingerprint)
        content = folder.look_up(sha256)
        if content and KEPT in content["kept"]:
            yield client, content["kept"][KEPT]


def versions(*more: str) -> dict[str, str]:
    """Return the versions of the packages that a result depends on, and of ``more``.

    That of fedbn-flwr names the commit where it runs from a checkout, as 0.1.0+g1a2b3c4 or 0.1.0+g1a2b3c4.changed.
    """
    names = ("fedbn-flwr", "flwr", "torch", "torchvision", "numpy", "ray", "flwr-datasets", *more)
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
    """Return "+g" and the commit of a package that git tracks, ".changed" if its files differ from it; "" elsewhere."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # the folder may lie in a repository of something else
        commit, changed = git("rev-parse", "--short=7", "HEAD"), git("status", "--porcelain", "--", ".")
    except (OSError, subprocess.SubprocessError):
        return ""
    return f"+g{commit}" + ".changed" * bool(changed)
