"""Weights & Biases; needs the extra ``wandb``.

The key ``wandb`` is the project, or ENTITY/PROJECT. ``WANDB_MODE=offline`` writes to ``OUT/wandb`` without a network,
and ``wandb sync`` sends it later. The id of the run is kept in the folder, so that a resumed run continues it.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping

from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.trackers.interface import Memory, Tracker, group_of, name_of, tags_of

__all__ = ["WandB"]

logger = logging.getLogger("flwr")

_SECONDS_TO_BEGIN = 15.0  # without a network; a later round tries again. The end of the process waits for an attempt


class WandB(Tracker):
    """A run of Weights & Biases: config, the numbers of each round by step = round, and the summary."""

    key = module = "wandb"

    @staticmethod
    def problem(config: Config) -> str:
        """Return the remedy if nobody is logged in and the mode is online."""
        import wandb

        online = wandb.setup().settings.mode in ("online", "shared")
        if not online or os.environ.get("WANDB_API_KEY") or wandb.login(prompt=False, verify=False):
            return ""
        return "nobody is logged in: run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline for no network"

    def open(self) -> int:
        """Begin or continue the run; warn of rounds that it has and that are repeated with other numbers."""
        self._file = self.folder / "wandb" / "fedbn-run.json"
        self._memory = Memory.read(self._file, self.config.wandb)
        if not self._memory.id:
            self._memory.id = uuid.uuid4().hex[:8]
            self._memory.write(self._file)
        entity, _, project = self.config.wandb.rpartition("/")
        self._run = self.package.init(
            entity=entity or None,
            project=project,
            id=self._memory.id,
            resume="allow",
            reinit="create_new",
            name=name_of(self.config, self.folder),
            group=group_of(self.config, self.folder) or None,
            tags=list(dict.fromkeys(tags_of(self.config).values())),
            config=self.config.to_mapping(),
            dir=str(self.folder),
            settings=self.package.Settings(console="off", silent=True, init_timeout=_SECONDS_TO_BEGIN),
        )
        last = max(self._memory.round, int(self._run.starting_step) - 1)
        if self.redone_after is not None and last > self.redone_after:
            logger.warning(
                "wandb has the rounds %d to %d as before the resume, and cannot change them; metrics.jsonl has "
                "those of the resumed run",
                self.redone_after + 1,
                last,
            )
        return last

    def add_round(self, server_round: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers; the package sends them from a process of its own."""
        self._run.log(dict(numbers), step=server_round)
        self._memory.round = server_round
        self._memory.write(self._file)

    def close(self, summary: Mapping[str, float | str] | None) -> None:
        """End the run; without a summary it is marked as failed."""
        self._run.summary.update(dict(summary or {}))
        self._run.finish(exit_code=1 if summary is None else 0)
