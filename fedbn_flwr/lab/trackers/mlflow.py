"""MLflow; needs the extra ``mlflow``.

The key ``mlflow`` is a tracking URI, or an absolute folder, in which the database ``mlflow.db`` is made. The id of the
run is kept in the run's folder, so that a resumed run continues it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.trackers.interface import Memory, Tracker, group_of, name_of, tags_of

__all__ = ["MLflow"]

_ROUND = "round"  # a metric that has the round as its value: the last round that MLflow has


class MLflow(Tracker):
    """A run of MLflow: the settings as parameters, the numbers of each round by step = round, and the summary."""

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
