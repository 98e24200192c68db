"""The output folder of a run, with files that are written atomically."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fedbn_flwr.batchnorm.array_types import State
from fedbn_flwr.batchnorm.class_moments import ClassMoments, encode_class_moments
from fedbn_flwr.checked_file import (
    encode_safetensors,
    remove_leftovers,
    write_atomically,
)
from fedbn_flwr.client.personal_model import client_file
from fedbn_flwr.errors import ConfigError, EngineError, NotResumableError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.config.check_config import own_modules
from fedbn_flwr.lab.config.yaml_text import read_yaml
from fedbn_flwr.lab.results.files import (
    CLASS_MOMENTS_FILE,
    CONFIG_FILE,
    PREDICTIONS_FILES,
    TESTS_FILE,
    read_metrics,
)
from fedbn_flwr.lab.results.tests_table import Measured, as_text, cut_back

__all__ = [
    "DIVERGED_AT",
    "PLACES",
    "PRIVACY",
    "RunFolder",
    "changed_settings",
    "extra",
    "is_locked",
    "lock_folder",
    "trusting",
    "writing",
]

logger = logging.getLogger("flwr")

PRIVACY = "privacy.jsonl"  # the spent privacy of each round; see privacy.accounting
# key in summary.json and metrics.jsonl: the first round with a non-finite loss
DIVERGED_AT = "diverged-at"

PLACES = frozenset(
    {
        "out",
        "checkpoint-every",
        "state-dir",
        "resume",
        "data-dir",
        "round-timeout",
        "fedtan-bind",
        "fedtan-address",
        "fedtan-tls-dir",
    }
)
"""Keys that change no result: places of files, timeouts, and the saving interval."""


def changed_settings(
    saved: Mapping[str, Any], now: Mapping[str, Any], free: Collection[str]
) -> str:
    """Return the keys with different values as text, ``KEY=1, now 2; ...``.

    The keys in ``free`` may differ and are left out.
    """
    changed = []
    for key in sorted({*saved, *now} - {*free}):
        if saved.get(key) != now.get(key):
            changed.append(f"{key}={saved.get(key)!r}, now {now.get(key)!r}")
    return "; ".join(changed)


@contextmanager
def lock_folder(path: Path, what: str = "run") -> Iterator[None]:
    """Make the folder of a run or a study, and lock it against other processes.

    Raises:
        ConfigError: another process has the lock, or the folder cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"out={str(path)!r} cannot be written: {error}") from error
    # Use a lock of the system, because the system frees it however this process ends.
    # The lock finds processes of a killed command that still write.
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = (
                f"out={str(path)!r}: another process is still writing this {what}. End"
                " it first."
            )
            raise ConfigError(text) from None
        yield
    finally:
        os.close(handle)


def is_locked(path: Path) -> bool:
    """Return whether a process of this machine has the lock of a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


@contextmanager
def writing(path: Path, then: str) -> Iterator[None]:
    """Raise EngineError if the block cannot write a file, as on a full disk.

    Args:
        path: the folder.
        then: the end of the message: how to continue after disk space was freed.
    """
    try:
        yield
    except OSError as error:
        raise EngineError(
            f"out={str(path)!r} cannot be written: {error}. Existing files stay. Free"
            f" disk space and {then}."
        ) from error


@contextmanager
def extra(name: str, again: str) -> Iterator[None]:
    """Log an exception in the block, and continue.

    The block makes an extra file or table in addition to the run's results.

    Args:
        name: the name of the extra.
        again: a sentence on how to make the extra again.
    """
    try:
        yield
    # Pictures and tables use other packages. The code of these packages may raise any
    # exception.
    except Exception as error:
        logger.warning(
            "%s failed: %s: %s. The other results do not depend on it. %s",
            name,
            type(error).__name__,
            str(error).removesuffix("."),
            again,
        )


def trusting(folder: Path) -> list[str]:
    """Return ["--trust"] if a run in the folder names modules of the user, else []."""
    for config in folder.rglob(CONFIG_FILE):
        if own_modules(RunFolder.settings(config.parent)):
            return ["--trust"]
    return []


class RunFolder:
    """A run's folder, with ``config.yaml``, ``metrics.jsonl`` and ``summary.json``.

    ``model.safetensors`` is written at the end. If the clients share the disk,
    ``clients/`` has each client's local entries. ``privacy.jsonl`` exists if the run has
    ``dp``.

    Args:
        path: the folder; it is made with its parents.
        config: the resolved config.
        after: the last finished round of a run to resume; None for a new run.

    Raises:
        ConfigError: the folder is in use or cannot be made, or it lacks rounds up to
            ``after``.
    """

    def __init__(self, path: Path, config: Config, after: int | None = None) -> None:
        self.path = path
        if after is None:
            self.refuse_used(path)
        settings = config.model_copy(update={"resume": False}).to_mapping()
        try:
            path.mkdir(parents=True, exist_ok=True)
            if after is not None:
                self._cut_back(after)
                # Remove the files of the earlier end, because a resumed run is not
                # finished.
                for name in ("summary.json", "doctor.json"):
                    (path / name).unlink(missing_ok=True)
                shutil.rmtree(path / "clients", ignore_errors=True)
            content = yaml.safe_dump(settings, sort_keys=False)
            write_atomically(path / "config.yaml", content)
        except OSError as error:
            raise ConfigError(
                f"out={str(path)!r} cannot be written: {error}"
            ) from error

    @staticmethod
    def refuse_used(path: Path) -> None:
        """Raise ConfigError if the folder is not empty."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            resume = (path / "checkpoint").is_dir()
            raise ConfigError(
                f"out={str(path)!r} is not empty. Choose another folder"
                f"{', or add --resume to continue its run' if resume else ''}."
            )

    @staticmethod
    def begun(path: Path) -> bool:
        """Remove partly written files of a killed run, and return whether a run began.

        Raises:
            ConfigError: the folder is not empty, but has no run.
        """
        remove_leftovers(path)
        names = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
        if names and "config.yaml" not in names:
            RunFolder.refuse_used(path)
        return bool(names)

    @staticmethod
    def settings(path: Path) -> dict[str, Any]:
        """Return the ``config.yaml`` of the folder's run, or {} without a run."""
        config = path / "config.yaml"
        return read_yaml(config, "config") if config.is_file() else {}

    @staticmethod
    def refuse_shorter(path: Path, num_rounds: int) -> None:
        """Raise ConfigError if the folder's run has more rounds than ``num_rounds``."""
        begun_with = int(RunFolder.settings(path).get("num-server-rounds", 0))
        if num_rounds < begun_with:
            raise ConfigError(
                f"num-server-rounds={num_rounds} is below the {begun_with} of the run"
                f" in out={str(path)!r}. A resume may lengthen a run but never shorten"
                f" it. Set {begun_with} or more, or use another folder for a new run."
            )

    def _cut_back(self, after: int) -> None:
        """Remove the lines of rounds later than ``after`` from the files of lines.

        Raises:
            NotResumableError: ``metrics.jsonl`` lacks a round up to ``after``.
        """
        # The resumed run repeats the rounds after ``after``.
        metrics = self.path / "metrics.jsonl"
        lines = read_metrics(metrics)[:after]
        if [line["round"] for line in lines] != list(range(1, after + 1)):
            raise NotResumableError(
                f"{metrics} lacks some of the rounds 1 to {after}. Restore it, or start"
                " a new run."
            )
        # Rewrite the file even if it has no complete line, because the next line would
        # follow the incomplete one.
        write_atomically(metrics, "".join(json.dumps(line) + "\n" for line in lines))
        for name in PREDICTIONS_FILES:
            (self.path / name).unlink(missing_ok=True)
        cut_back(self.path, after)

    def add_round(self, line: Mapping[str, Any]) -> None:
        """Append one round to ``metrics.jsonl``.

        Raises:
            EngineError: the line was not written, or only in part; readers ignore an
                incomplete line.
        """
        self.append("metrics.jsonl", _clean(line))

    def add_tests(self, tests: Sequence[Measured]) -> None:
        """Append the tests of a round to ``tests.csv``, before the line of the round.

        Raises:
            EngineError: as ``add_round``.
        """
        new = not (self.path / TESTS_FILE).exists()
        if tests or new:
            self._append(TESTS_FILE, as_text(tests, header=new))

    def append(self, name: str, line: Mapping[str, Any]) -> None:
        """Append a line to a file of the folder.

        Raises:
            EngineError: as ``add_round``.
        """
        self._append(name, json.dumps(line) + "\n")

    def _append(self, name: str, text: str) -> None:
        # Write the line in one call, so that a kill never splits it, and call fsync, so
        # that a loss of power never removes a round that a checkpoint already has.
        data = text.encode()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with self._writing():
            handle = os.open(self.path / name, flags, 0o644)
            try:
                if os.write(handle, data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(handle)
            finally:
                os.close(handle)

    def save_clients(self, kept: Iterable[tuple[str, State]]) -> list[str]:
        """Write the local entries of clients, and return the names of these clients."""
        # Make the files readable for their owner only, because they may reveal a
        # client's data.
        clients = []
        with self._writing():
            for client, entries in kept:
                path = client_file(self.path, client)
                path.parent.mkdir(exist_ok=True, mode=0o700)
                about = {"format": "pt", "client": client}
                write_atomically(path, encode_safetensors(entries, about), mode=0o600)
                clients.append(client)
        return clients

    def save(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file of the folder."""
        text = json.dumps(_clean(content), indent=2)
        with self._writing():
            write_atomically(self.path / name, text + "\n")

    def save_class_moments(self, moments: ClassMoments) -> None:
        """Write ``class_moments.npz``."""
        content = encode_class_moments(moments)
        with self._writing():
            write_atomically(self.path / CLASS_MOMENTS_FILE, content, mode=0o600)

    def save_model(self, state: State, about: Mapping[str, str]) -> None:
        """Write the model with ``about`` as metadata."""
        with self._writing():
            model = encode_safetensors(state, about)
            write_atomically(self.path / "model.safetensors", model)

    def _writing(self) -> AbstractContextManager[None]:
        return writing(self.path, "continue with --resume (resume=true)")


def _clean(value: Any) -> Any:
    """Return the value with None for NaN and infinity, because JSON lacks these."""
    if isinstance(value, Mapping):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value
