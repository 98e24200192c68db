"""The files with a client's local state (``kept``).

The folder has the newest file, and a file for each round from which a run can resume.
The paths are ``STATE_DIR/EXPERIMENT/partition-P/SEQUENCE.RUN.ROUND.safetensors``, and
``checked_file`` reads and writes the files. RUN names a run and its resumptions.
EXPERIMENT, the experiment id, may have several runs: each continues with the local
state of the run before.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedbn_flwr.checked_file import read_checked, remove_leftovers, write_checked
from fedbn_flwr.errors import StateError
from fedbn_flwr.messages.protocol import Continuity

logger = logging.getLogger("flwr")

_FILE = re.compile(
    r"(?P<sequence>\d+)\.(?P<run>[A-Za-z0-9_-]+)\.(?P<round>\d+)\.safetensors"
)


def partition_folder(root: Path, continuity: Continuity, partition_id: int) -> Path:
    """Return the folder of one client in one experiment."""
    return root / continuity.series / f"partition-{partition_id}"


class _File(NamedTuple):
    sequence: int
    run: str
    server_round: int
    path: Path


class KeptFiles:
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
        # These values are in each file of this client. A file with other values was
        # copied here from another client or model.
        self._owner = {
            "kind": "client",
            "series": continuity.series,
            "partition": partition_id,
            "fingerprint": fingerprint,
        }

    def newest(self) -> dict[str, Any] | None:
        """Return the newest content of any run.

        A damaged or foreign file is skipped, with a warning.
        """
        for _, content in self._readable():
            return content
        return None

    def find(self, sha256: str) -> dict[str, Any] | None:
        """Return the content with this hash, and remove this run's later files.

        An empty hash selects the newest file of another run.
        """
        for file, content in self._readable():
            if sha256:
                found = content["sha256"] == sha256
            else:
                found = file.run != self._continuity.run
            if found:
                # Later files are from rounds that the server has undone.
                self._remove_after(file.sequence)
                return content
        if not sha256:
            self._remove_after(-1)
        return None

    def look_up(self, sha256: str) -> dict[str, Any] | None:
        """Return the content with this hash, without changing files.

        An empty hash is the hash of a client that keeps nothing, and only matches files
        of this run.
        """
        for file, content in self._readable():
            of_run = bool(sha256) or file.run == self._continuity.run
            if of_run and content["sha256"] == sha256:
                return content
        return None

    def write(self, content: Mapping[str, Any], server_round: int) -> None:
        """Write the local state after a round.

        Also remove files that neither the client nor a resume needs. The previous file
        is kept, because the round may have to be undone, and a run that ends in the
        middle of a round saves the round before.

        Args:
            content: the local state.
            server_round: the round.

        Raises:
            StateError: the folder cannot be written; its files are kept.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            remove_leftovers(self.path)
            earlier = self._files()
            sequence = earlier[0].sequence + 1 if earlier else 0
            run = self._continuity.run
            path = self.path / f"{sequence:06d}.{run}.{server_round}.safetensors"
            write_checked(
                path, {**self._owner, "run": run, "round": server_round, **content}
            )
            # Remove old files only after the new file is written, because a full disk
            # must not destroy the existing files.
            needed = {
                self._standing(earlier, committed)
                for committed in self._continuity.committed
            }
            for file in earlier[1:]:
                if file not in needed:
                    file.path.unlink(missing_ok=True)
        except OSError as error:
            raise StateError(
                f"state folder {self.path} cannot be written: {error}. The state of"
                " earlier rounds is kept. Free disk space, or set another folder"
                " (state-dir)."
            ) from error

    def _standing(self, files: Iterable[_File], committed: int) -> _File | None:
        """Return the file for a resume from round ``committed``, or None.

        It is this run's newest file up to the round, or another run's newest file.
        """
        of_others = None
        for file in files:  # newest first
            if file.run != self._continuity.run:
                if of_others is None:
                    of_others = file
            elif file.server_round <= committed:
                return file
        return of_others

    def _remove_after(self, sequence: int) -> None:
        for file in self._files():
            if file.run == self._continuity.run and file.sequence > sequence:
                file.path.unlink(missing_ok=True)

    def _files(self) -> list[_File]:
        """Return the files, newest first."""
        if not self.path.is_dir():
            return []
        files = []
        for path in self.path.iterdir():
            match = _FILE.fullmatch(path.name)
            if match:
                sequence, server_round = int(match["sequence"]), int(match["round"])
                files.append(_File(sequence, match["run"], server_round, path))
        return sorted(files, reverse=True)

    def _readable(self) -> Iterator[tuple[_File, dict[str, Any]]]:
        """Yield the files that are complete and belong to this client, newest first."""
        for file in self._files():
            wanted = {**self._owner, "run": file.run, "round": file.server_round}
            try:
                content = read_checked(file.path)
                for key, value in wanted.items():
                    if content.get(key) != value:
                        raise StateError(f"{file.path} was written for another {key}")
            except StateError as error:
                logger.warning(
                    "skipping a file, and looking for an earlier file: %s",
                    error,
                )
                continue
            yield file, content
