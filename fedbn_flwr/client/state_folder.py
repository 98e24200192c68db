"""A client's durable copies of its kept state: the newest, and one for each round from
which a run can resume.

``STATE_DIR/EXPERIMENT/partition-P/SEQUENCE.RUN.ROUND.safetensors``, checked files. RUN
names a run and its resumptions. EXPERIMENT, the experiment id, may have several runs:
each continues with the client state of the run before.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import Context

from fedbn_flwr.checked_file import read_checked, remove_leftovers, write_checked
from fedbn_flwr.client.permissions import check_path
from fedbn_flwr.errors import ConfigError, StateError
from fedbn_flwr.messages.protocol import STATE_DIR, Continuity

__all__ = ["StateFolder", "partition_folder", "state_dir"]

logger = logging.getLogger("flwr")

_FILE = re.compile(
    r"(?P<sequence>\d+)\.(?P<run>[A-Za-z0-9_-]+)\.(?P<round>\d+)\.safetensors"
)


def state_dir(context: Context, of_run: str | None = None) -> Path | None:
    """Return a node's state folder: its own ``state-dir``, or that of the run; None
    without either.

    Args:
        context: the node's context.
        of_run: the run's folder; None = the one that the run config names.

    Raises:
        ConfigError: the path is not absolute, or it is the run's and the node does not
            allow it.
    """
    if of_run is None:
        of_run = str(context.run_config.get(STATE_DIR, ""))
    own = str(context.node_config.get(STATE_DIR, ""))
    if of_run and not own:
        check_path(context, STATE_DIR, of_run)
    named = os.path.expanduser(own or of_run)
    if named and not Path(named).is_absolute():
        raise ConfigError(f"state-dir={named!r} is relative; write an absolute path")
    return Path(named) if named else None


def partition_folder(root: Path, continuity: Continuity, partition_id: int) -> Path:
    """Return the folder of one client in one experiment."""
    return root / continuity.series / f"partition-{partition_id}"


class _File(NamedTuple):
    sequence: int
    run: str
    server_round: int
    path: Path


class StateFolder:
    """The files of one client in one experiment.

    Args:
        root: the state folder of the node.
        continuity: the client's run.
        partition_id: the client's partition.
        fingerprint: the fingerprint of the model; files of another model are not used.
    """

    def __init__(
        self, root: Path, continuity: Continuity, partition_id: int, fingerprint: str
    ) -> None:
        self.path = partition_folder(root, continuity, partition_id)
        self._continuity = continuity
        self._owner = {
            "kind": "client",
            "series": continuity.series,
            "partition": partition_id,
        }
        self._owner |= {"fingerprint": fingerprint}

    def newest(self) -> dict[str, Any] | None:
        """Return the newest content of any run; a damaged or foreign file is skipped,
        with a warning.
        """
        return next((content for _, content in self._readable()), None)

    def find(self, sha256: str) -> dict[str, Any] | None:
        """Return the content with this hash ("": of another run), and remove what this
        run wrote after it.
        """
        for file, content in self._readable():
            if content["sha256"] == sha256 or (
                not sha256 and file.run != self._continuity.run
            ):
                self._remove_after(file.sequence)
                return content
        if not sha256:
            self._remove_after(-1)
        return None

    def look_up(self, sha256: str) -> dict[str, Any] | None:
        """Return the content with this hash ("": of this run, which keeps nothing), and
        change nothing.
        """
        for file, content in self._readable():
            if content["sha256"] == sha256 and (
                sha256 or file.run == self._continuity.run
            ):
                return content
        return None

    def write(self, content: Mapping[str, Any], server_round: int) -> None:
        """Write the kept state after a round; remove files that neither the client nor
        a resume needs.

        The file before stays: the round may have to be undone, and a run that is ended
        in mid-round saves the last one.

        Args:
            content: the kept state.
            server_round: the round.

        Raises:
            StateError: the folder cannot be written; the files in it stay.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            remove_leftovers(self.path)
            files = self._files()
            sequence = files[0].sequence + 1 if files else 0
            run = self._continuity.run
            path = self.path / f"{sequence:06d}.{run}.{server_round}.safetensors"
            write_checked(
                path, {**self._owner, "run": run, "round": server_round, **content}
            )
            needed = {
                self._standing(files, committed)
                for committed in self._continuity.committed
            }
            for file in files[1:]:
                if file not in needed:
                    file.path.unlink(missing_ok=True)
        except OSError as error:
            raise StateError(
                f"state folder {self.path} cannot be written: {error}. The state of"
                " earlier rounds stays. Free disk space, or set another folder"
                " (state-dir)."
            ) from error

    def _standing(self, files: Iterable[_File], committed: int) -> _File | None:
        """Return the file for a resume from this round: this run's newest up to it,
        else another run's newest.
        """
        of_others = None
        for file in files:  # newest first
            if file.run != self._continuity.run:
                of_others = of_others or file
            elif file.server_round <= committed:
                return file
        return of_others

    def _remove_after(self, sequence: int) -> None:
        for file in self._files():
            if file.run == self._continuity.run and file.sequence > sequence:
                file.path.unlink(missing_ok=True)

    def _files(self) -> list[_File]:
        """Return the files, newest first."""
        files = []
        for path in self.path.iterdir() if self.path.is_dir() else ():
            match = _FILE.fullmatch(path.name)
            if match:
                files.append(
                    _File(
                        int(match["sequence"]), match["run"], int(match["round"]), path
                    )
                )
        return sorted(files, reverse=True)

    def _readable(self) -> Iterator[tuple[_File, dict[str, Any]]]:
        for file in self._files():
            try:
                content = read_checked(file.path)
                wanted = {**self._owner, "run": file.run, "round": file.server_round}
                if wrong := [
                    key for key, value in wanted.items() if content.get(key) != value
                ]:
                    raise StateError(f"{file.path} was written for another {wrong[0]}")
            except StateError as error:
                logger.warning(
                    "looking for an earlier file, because this one is not used: %s",
                    error,
                )
                continue
            yield file, content
