"""The trackers, each with the extra of its name: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import logging
import os
import re
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.trackers.interface import Memory, Tracker, group_of, name_of, tags_of

__all__ = ["MLflow", "TensorBoard", "WandB"]

logger = logging.getLogger("flwr")

_SECONDS_TO_BEGIN = 15.0  # without a network; a later round tries again. The end of the process waits for an attempt
_ROUND = "round"  # a metric that has the round as its value: the last round that MLflow has


class TensorBoard(Tracker):
    """Writes the numbers to an event file that ``tensorboard --logdir`` can read during the run.

    A resumed run writes its event file anew, from ``metrics.jsonl``: a process that was killed leaves rounds out that
    it had not written yet, and leaves others that are repeated.
    """

    key = module = "tensorboard"

    def open(self) -> int:
        """Open a new event file in place of those of the run so far; return 0."""
        from torch.utils.tensorboard import SummaryWriter

        folder = self.folder / "tensorboard"
        for earlier in folder.glob("events.out.tfevents.*"):
            earlier.unlink()
        self._writer = SummaryWriter(str(folder), purge_step=0)  # a TensorBoard that is open drops what it has read
        return 0

    def add_round(self, server_round: int, numbers: Mapping[str, float]) -> None:
        """Write and flush the numbers."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, server_round)
        self._writer.flush()

    def close(self, summary: Mapping[str, float | str] | None) -> None:
        """Close the file."""
        self._writer.close()


class WandB(Tracker):
    """A run of Weights & Biases: config, the numbers of each round by step = round, and the summary.

    The key ``wandb`` is the project, or ENTITY/PROJECT. ``WANDB_MODE=offline`` writes to ``OUT/wandb`` without a
    network, and ``wandb sync`` sends it later. The id of the run is kept in the folder, so that a resumed run continues
    it.
    """

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


class MLflow(Tracker):
    """A run of MLflow: the settings as parameters, the numbers of each round by step = round, and the summary.

    The key ``mlflow`` is a tracking URI, or an absolute folder, in which the database ``mlflow.db`` is made. The id of
    the run is kept in the run's folder, so that a resumed run continues it.
    """

    key = module = "mlflow"

    @staticmethod
    def problem(config: Config) -> str:
        """Return the remedy for a relative folder."""
        if _is_uri(config.mlflow) or Path(config.mlflow).is_absolute():
            return ""
        return f"a folder must be an absolute path, such as {str(Path(config.mlflow).absolute())!r}; a URI has a ':'"

    def open(self) -> int:
        """Begin or continue the run."""
        uri, artifacts = self.config.mlflow, None
        if not _is_uri(uri):
            place = Path(uri)
            place.mkdir(parents=True, exist_ok=True)
            uri, artifacts = f"sqlite:///{place}/mlflow.db", (place / "artifacts").as_uri()
        self._client = self.package.MlflowClient(tracking_uri=uri)
        file = self.folder / "mlflow.json"
        self._memory = Memory.read(file, self.config.mlflow)
        if not self._memory.id:
            self._memory.id = self._new_run(artifacts)
            self._memory.write(file)
        data = self._client.get_run(self._memory.id).data
        if not data.params:  # a parameter cannot be changed later
            param = self.package.entities.Param
            params = [param(key, str(value)) for key, value in self.config.to_mapping().items()]
            self._client.log_batch(self._memory.id, params=params)
        self._client.update_run(self._memory.id, status="RUNNING")
        self._memory.round = int(data.metrics.get(_ROUND, 0))
        if self.redone_after is not None:  # a later value of a step takes the place of the earlier one
            self._memory.round = min(self._memory.round, self.redone_after)
        return self._memory.round

    def _new_run(self, artifacts: str | None) -> str:
        """Return the id of a new run, of an experiment that is made if it is absent."""
        name = group_of(self.config, self.folder) or os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedbn-flwr")
        with suppress(self.package.exceptions.MlflowException):  # it is there: another run may make it at this moment
            self._client.create_experiment(name, artifacts)
        experiment = self._client.get_experiment_by_name(name)
        tags = tags_of(self.config)
        run = self._client.create_run(experiment.experiment_id, run_name=name_of(self.config, self.folder), tags=tags)
        return str(run.info.run_id)

    def add_round(self, server_round: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers, and the round last."""
        self._memory.round = server_round
        self._log({**numbers, _ROUND: server_round})

    def close(self, summary: Mapping[str, float | str] | None) -> None:
        """End the run; without a summary it is marked as failed."""
        numbers = {}
        for name, value in (summary or {}).items():
            if isinstance(value, str):
                self._client.set_tag(self._memory.id, name, value)
            else:
                numbers[name] = value
        self._log(numbers)
        self._client.set_terminated(self._memory.id, "FAILED" if summary is None else "FINISHED")

    def _log(self, numbers: Mapping[str, float]) -> None:
        """Log numbers at the last round; MLflow allows some characters in names."""
        now, metric = int(1000 * time.time()), self.package.entities.Metric
        names = {name: re.sub(r"[^\w\-. /:]", "_", name) for name in numbers}
        metrics = [metric(names[name], value, now, self._memory.round) for name, value in numbers.items()]
        self._client.log_batch(self._memory.id, metrics=metrics)


def _is_uri(place: str) -> bool:
    return ":" in place or place == "databricks"
