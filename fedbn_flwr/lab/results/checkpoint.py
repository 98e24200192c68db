"""Checkpoints of the server.

The last two checkpoints are in ``OUT/checkpoint``. Each has all data for an exact
resume. With early stopping, the checkpoints of rounds that may become the run's result
stay as well.

A checkpoint contains the global model, the strategy's ``state_dict()``, and the id of
the run. Clients find their local state in the state folder by this id. Every random
draw has its own stream by seed, purpose, round and partition, so no generator is saved.
History and traffic are in ``metrics.jsonl``; a resume removes later rounds from it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch import nn

from fedbn_flwr.batchnorm.array_types import State
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.checked_file import read_checked, remove_leftovers, write_checked
from fedbn_flwr.errors import ConfigError, EngineError, NotResumableError, StateError
from fedbn_flwr.lab.config import Config, schedule_changes
from fedbn_flwr.lab.early_stopping import EarlyStopping
from fedbn_flwr.lab.models import code_changed, code_sha256
from fedbn_flwr.lab.results.files import command, read_metrics
from fedbn_flwr.lab.results.folder import PLACES, RunFolder, changed_settings
from fedbn_flwr.lab.results.same_data import refuse_other_data
from fedbn_flwr.lab.results.summary import versions
from fedbn_flwr.messages.protocol import Continuity
from fedbn_flwr.messages.records import views
from fedbn_flwr.strategies import Strategy

logger = logging.getLogger("flwr")

_FORMAT = 3  # version of the format of checkpoint files
_KEPT = 2
_LONG = 20.0  # a kill may lose this many seconds of work, and one round
# keys that a resume may change; another value of any other key makes another run
_FREE = PLACES | {"num-server-rounds", "on-divergence"}


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after a round.

    Attributes:
        server_round: the last finished round; 0 before the first.
        state: the global model.
        strategy: ``state_dict()`` of the strategy.
        run: id of the run and its resumptions; see ``Continuity``.
        resumed_after: the rounds after which the run was resumed so far.
    """

    server_round: int
    state: State
    strategy: Mapping[str, Any]
    run: str
    resumed_after: list[int] = field(default_factory=list)


class Checkpoints:
    """The checkpoints in a run's folder.

    ``beginning`` returns the starting point of the run. ``follow`` restores its
    strategy; then the methods ``after_round``, ``after_run`` and ``on_signal`` save it.

    Args:
        out: the run's folder.
        config: the resolved config; a checkpoint with another config is refused.
        fingerprint: the fingerprint of the model: names, layer types and shapes.

    Attributes:
        resumed_after: the rounds after which the run was resumed so far.
    """

    def __init__(self, out: Path, config: Config, fingerprint: str) -> None:
        self.folder = out / "checkpoint"
        self._config = config
        self._owner = {"kind": "server", "version": _FORMAT, "fingerprint": fingerprint}
        self._saved_at = time.monotonic()
        # The state of the run after the last complete round. It is None without
        # checkpoints, and before the first complete round after a start or a resume.
        self._whole: Checkpoint | None = None
        self._run = uuid4().hex[:16]
        self._warned = False
        self.resumed_after: list[int] = []

    @classmethod
    def of(cls, out: Path, config: Config, model: nn.Module) -> Checkpoints:
        """Return the checkpoints of a run with this model."""
        state = model.state_dict()
        shapes = {name: tuple(value.shape) for name, value in state.items()}
        return cls(out, config, split_state(model).fingerprint(shapes))

    def beginning(self) -> tuple[Checkpoint | None, int | None]:
        """Return the checkpoint from which the run continues, and its round.

        Without a checkpoint, a new run has no round, and a run that began has round 0.

        Raises:
            ConfigError: the config asks for fewer rounds than the run has.
            NotResumableError: the run has rounds but no usable checkpoint, or the data
                have changed.
        """
        out = self.folder.parent
        if not (self._config.resume and RunFolder.begun(out)):
            return None, None
        refuse_other_data(out, self._config)
        saved = self.to_resume()
        return saved, saved.server_round if saved else 0

    def follow(self, strategy: Strategy, saved: Checkpoint | None) -> None:
        """Save this strategy from now on, after it is restored from a checkpoint.

        Raises:
            NotResumableError: clients kept their local state in memory only, so it is
                lost, or the file of a client is damaged.
        """
        self._strategy = strategy
        if saved:
            volatile = saved.strategy["kept"]["volatile"]
            if volatile:
                raise NotResumableError(
                    f"cannot resume: client(s) {', '.join(volatile)} kept their local"
                    " state in memory only, and it is lost. Give runs of this strategy"
                    " a state folder (state-dir) from the start."
                )
            self._refuse_damaged_clients(saved)
            after = saved.server_round
            logger.info("resumed after round %d from %s", after, self.folder)
            strategy.load_state_dict(saved.strategy, after)
            self.set_aside_after(after)
            self._run = saved.run
            self.resumed_after = [*saved.resumed_after, after]
        self._name_run()

    def _refuse_damaged_clients(self, saved: Checkpoint) -> None:
        """Read the local states in the run's folder that the clients continue from."""
        for label, sha256 in saved.strategy["kept"]["hashes"].items():
            of_client = self.folder / "clients" / saved.run / f"partition-{label}"
            for path in of_client.glob(f"*.{sha256}.*"):
                try:
                    read_checked(path)
                except StateError as error:
                    raise NotResumableError(
                        f"cannot resume: the local state of client {label}: {error}."
                        " Without this file, the client begins again."
                    ) from error

    @property
    def rounds(self) -> list[int]:
        """The rounds of the existing checkpoints, oldest first."""
        return _rounds(self.folder)

    def due(
        self, server_round: int, last: bool, stopping: EarlyStopping | None = None
    ) -> bool:
        """Return whether a checkpoint is due after a round.

        It is due before round 1, every ``checkpoint-every`` rounds, 20 seconds after
        the previous checkpoint, and after the last and the best round. With
        ``checkpoint-every=0``, it is never due.
        """
        every = self._config.checkpoint_every
        if every == 0:
            return False
        if last or server_round % every == 0:
            return True
        if time.monotonic() - self._saved_at >= _LONG:
            return True
        return stopping is not None and stopping.best(server_round) == server_round

    def save(
        self, checkpoint: Checkpoint, stopping: EarlyStopping | None = None
    ) -> None:
        """Write a checkpoint, and remove old checkpoints.

        The last two checkpoints stay. With early stopping, the checkpoint of the best
        round up to each of these two also stays.

        Raises:
            EngineError: the folder cannot be written; earlier checkpoints stay.
        """
        content = {
            **self._owner,
            "code": code_sha256(self._config.model),
            "loop-code": code_sha256(self._config.loop),
            "config": self._config.to_mapping(),
            "versions": versions(),
            **vars(checkpoint),
        }
        try:
            self.folder.mkdir(exist_ok=True, mode=0o700)
            remove_leftovers(self.folder)
            write_checked(self._path(checkpoint.server_round), content)
            # Remove old checkpoints only after the new checkpoint is complete. For each
            # kept checkpoint, also keep the checkpoint of its best round, because a run
            # may be resumed from either.
            last = self.rounds[-_KEPT:]
            needed: set[int | None] = {*last}
            if stopping:
                needed.update(map(stopping.best, last))
            for at in self.rounds:
                if at not in needed:
                    self._path(at).unlink()
            self._saved_at = time.monotonic()
        except OSError as error:
            existing = ", ".join(map(str, self.rounds)) or "none"
            raise EngineError(
                f"the checkpoint of round {checkpoint.server_round} cannot be written"
                f" to {self.folder}: {error}. Existing checkpoints: round {existing}."
                " Free disk space and continue with --resume (resume=true)."
            ) from error

    def latest(self) -> Checkpoint | None:
        """Return the newest good checkpoint, or None if the folder has none.

        A damaged checkpoint, or a checkpoint of another run, is skipped with a warning
        that gives the reason.

        Raises:
            ConfigError: there are checkpoints, but none can be used; the error gives
                all reasons.
        """
        reasons = []
        for server_round in reversed(self.rounds):
            try:
                return self.read(server_round)
            except (StateError, ConfigError) as error:
                logger.warning(
                    "checkpoint of round %d refused: %s", server_round, error
                )
                reasons.append(str(error))
        if reasons:
            raise NotResumableError(
                "no checkpoint can be used:\n" + "\n".join(dict.fromkeys(reasons))
            )
        return None

    def to_resume(self) -> Checkpoint | None:
        """Return the checkpoint from which the folder's run continues.

        It is None if the run was stopped before its first checkpoint.

        Raises:
            ConfigError: the config asks for fewer rounds than the run has.
            NotResumableError: the run has rounds but no checkpoint, or no usable one.
        """
        out = self.folder.parent
        RunFolder.refuse_shorter(out, self._config.num_server_rounds)
        # Warn if the run is longer now: decays at a fraction of the rounds come later,
        # so the earlier rounds would have been different.
        before = int(RunFolder.settings(out).get("num-server-rounds", 0))
        for line in schedule_changes(self._config, before):
            logger.warning("%s", line)
        saved = self.latest()
        if saved is None and read_metrics(out / "metrics.jsonl"):
            raise NotResumableError(
                f"out={str(out)!r} contains a run, but no checkpoint to resume"
                " from (checkpoint-every=0?)."
            )
        return saved

    def best(self, stopping: EarlyStopping) -> Checkpoint | None:
        """Return the checkpoint of the best round, or None without a score.

        Raises:
            EngineError: the checkpoint cannot be used.
        """
        best = stopping.best()
        if best is None:
            return None
        try:
            return self.read(best)
        except (ConfigError, StateError) as error:
            raise EngineError(
                f"round {best} has the best {stopping.metric}, but its checkpoint"
                f" cannot be used: {error}. Start a new run."
            ) from error

    def read(self, server_round: int) -> Checkpoint:
        """Return the checkpoint of a round.

        Raises:
            StateError: the checkpoint is missing or damaged, or it belongs to another
                model, other code of the model, or another version of fedbn-flwr.
            ConfigError: it belongs to a run with other settings.
        """
        path = self._path(server_round)
        content = read_checked(path)
        # Check the version first, because a file of another version may have other
        # keys.
        if any(content.get(key) != self._owner[key] for key in ("kind", "version")):
            raise StateError(
                f"{path} is a checkpoint of another version of fedbn-flwr. Resume the"
                " run with that version, or start a new run."
            )

        # Compare everything that identifies a run: settings, model, user's code and
        # round.
        saved = Config.make(content["config"]).to_mapping()
        changed = changed_settings(saved, self._config.to_mapping(), _FREE)
        if changed:
            raise ConfigError(
                f"{path} belongs to a run with other settings: {changed}. A resume may"
                f" only change {', '.join(sorted(_FREE - {'out', 'resume'}))}; for"
                " other settings choose another folder."
            )
        if content["fingerprint"] != self._owner["fingerprint"]:
            raise StateError(
                f"{path} belongs to another model: its names, layer types or shapes"
                " changed"
            )
        changed = code_changed(
            self._config.model, content.get("code", "")
        ) or code_changed(self._config.loop, content.get("loop-code", ""), "loop")
        if changed:
            raise StateError(f"{path}: {changed}")
        if content["server_round"] != server_round:
            raise StateError(f"{path} contains round {content['server_round']}")

        # Only warn of another version of a package, because it may only change the last
        # bits.
        here, other = versions(), []
        for package, version in content["versions"].items():
            if here.get(package) != version:
                other.append(f"{package} {version}, now {here.get(package)}")
        if other:
            logger.warning(
                "the checkpoint was written with %s. The last bits may differ.",
                "; ".join(other),
            )
        entries = {key: content[key] for key in Checkpoint.__dataclass_fields__}
        return Checkpoint(**entries)

    def set_aside_after(self, server_round: int) -> None:
        """Rename the checkpoints of rounds after ``server_round``.

        These were refused, so they must not count among the two that are kept.
        """
        for later in self.rounds:
            if later > server_round:
                self._path(later).rename(self._path(later).with_suffix(".refused"))

    def after_round(
        self, server_round: int, stopping: EarlyStopping | None = None
    ) -> None:
        """Save a checkpoint if one is due, and warn of clients without state files."""
        if not self._config.checkpoint_every:
            return
        self._whole = self._checkpoint(server_round)
        last = server_round == self._config.num_server_rounds
        last = last or self._strategy.ends
        if self.due(server_round, last, stopping):
            self._save(self._whole, stopping)

    def on_signal(self, stopping: EarlyStopping | None = None) -> None:
        """Save the last complete round, if a signal ends the run within a round."""
        if self._whole and self._whole.server_round not in self.rounds:
            self._save(self._whole, stopping)

    def after_run(self, stopping: EarlyStopping | None = None) -> None:
        """Save the last round's checkpoint, unless ``after_round`` has done so."""
        # ``after_round`` saves the planned last round, but early stopping may end the
        # run before it.
        if not self._strategy.reports:
            return
        last = self._strategy.reports[-1].server_round
        if last in self.rounds:
            return
        if self.due(last, True, stopping):
            self._save(self._checkpoint(last), stopping)

    def _checkpoint(self, server_round: int) -> Checkpoint:
        """Return the current state of the run."""
        # Do not copy the arrays, because a round makes new arrays and states.
        state = views(self._strategy.run.arrays)
        strategy = self._strategy.state_dict()
        return Checkpoint(server_round, state, strategy, self._run, self.resumed_after)

    def _save(self, checkpoint: Checkpoint, stopping: EarlyStopping | None) -> None:
        self.save(checkpoint, stopping)
        self._name_run()
        volatile = self._strategy.run.kept.volatile
        if volatile and not self._warned:
            self._warned = True
            logger.warning(
                "client(s) %s keep their local state in memory only: this run cannot be"
                " resumed. Set state-dir, in the run's config or in each node's.",
                ", ".join(self._strategy.run.nodes.with_names(sorted(volatile))),
            )

    def _name_run(self) -> None:
        """Let the strategy name the run and its saved rounds to the clients."""
        rounds = tuple(self.rounds)
        self._strategy.continuity = Continuity(self._run, rounds)

    def _path(self, server_round: int) -> Path:
        return self.folder / f"round-{server_round:06d}.safetensors"


def _rounds(folder: Path) -> list[int]:
    return sorted(
        int(path.stem.removeprefix("round-"))
        for path in folder.glob("round-*.safetensors")
    )


def after_interrupt(out: Path, options: str = "") -> str:
    """Return the saved results of an interrupted run, and the command to continue.

    The text is empty if nothing was written.

    Args:
        out: the run's folder.
        options: further options of the command.
    """
    lines = read_metrics(out / "metrics.jsonl")
    begun_with = RunFolder.settings(out).get("num-server-rounds")
    if begun_with is None:
        return ""
    results = "no results"
    if lines:
        results = f"the results of round {lines[-1]['round']} of {begun_with}"
    rounds = _rounds(out / "checkpoint")
    if rounds:
        point = f"a checkpoint of round {rounds[-1]}"
        go_on = f"Continue with: {command('run', '--out', out)}{options} --resume"
    else:
        point = "no checkpoint"
        go_on = "It cannot be continued. Start a new run in another folder."
    return f"Saved in {out}: {results}, and {point}.\n{go_on}"
