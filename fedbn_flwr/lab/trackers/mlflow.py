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
from typing import Any, ClassVar

from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.trackers.interface import Memory, draws_anew, group_of, name_of, tags_of

__all__ = ["MLflow"]

_MOST = 100  # parameters in one call
_ROUND = "round"  # a metric that has the round as its value: the last round that MLflow has


class MLflow:
    """A run of MLflow: the settings as parameters, the numbers of each round by step = round, and the summary."""

    key: ClassVar[str] = "mlflow"
    module: ClassVar[str] = "mlflow"

    def __init__(self, config: Config, folder: Path, after: int) -> None:
        import mlflow

        self._mlflow, self._config, self._folder = mlflow, config, folder
        self._file = folder / "mlflow.json"
        self._memory = Memory.read(self._file, config.mlflow)
        self._client: Any = None
        self._repeated_after = after if draws_anew(config) else None

    @staticmethod
    def problem(config: Config) -> str:
        """Return the remedy for a relative folder."""
        if _is_uri(config.mlflow) or Path(config.mlflow).is_absolute():
            return ""
        return f"a folder must be an absolute path, such as {str(Path(config.mlflow).absolute())!r}; a URI has a ':'"

    def open(self) -> int:
        """Begin or continue the run."""
        place = self._config.mlflow
        uri, files = place, None
        if not _is_uri(place):
            Path(place).mkdir(parents=True, exist_ok=True)
            uri, files = f"sqlite:///{place}/mlflow.db", (Path(place) / "artifacts").as_uri()
        self._client = self._mlflow.MlflowClient(tracking_uri=uri)
        if not self._memory.id:
            experiment = group_of(self._config, self._folder) or os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedbn-flwr")
            number = self._experiment(experiment, files)
            name = name_of(self._config, self._folder)
            run = self._client.create_run(number, run_name=name, tags=tags_of(self._config))
            self._memory.id = run.info.run_id
            self._memory.write(self._file)
        data = self._client.get_run(self._memory.id).data
        if not data.params:  # a parameter cannot be changed later
            values = [self._mlflow.entities.Param(k, str(v)) for k, v in self._config.to_mapping().items()]
            self._log(params=values)
        self._client.update_run(self._memory.id, status="RUNNING")
        self._memory.round = int(data.metrics.get(_ROUND, 0))
        if self._repeated_after is not None:  # a later value of a step takes the place of the earlier one
            self._memory.round = min(self._memory.round, self._repeated_after)
        return self._memory.round

    def _experiment(self, name: str, files: str | None) -> str:
        """Return the id of the experiment; it is made if it is absent, by one of several runs at a time."""
        if not self._client.get_experiment_by_name(name):
            with suppress(self._mlflow.exceptions.MlflowException):  # another run was quicker
                self._client.create_experiment(name, files)
        return str(self._client.get_experiment_by_name(name).experiment_id)

    def add_round(self, server_round: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers, and the round last."""
        self._log(metrics=self._metrics({**numbers, _ROUND: server_round}, server_round))
        self._memory.round = server_round

    def close(self, summary: Mapping[str, float | str] | None) -> None:
        """End the run; without a summary it is marked as failed."""
        values = {name: value for name, value in (summary or {}).items() if not isinstance(value, str)}
        self._log(metrics=self._metrics(values, self._memory.round))
        for name, text in (summary or {}).items():
            if isinstance(text, str):
                self._client.set_tag(self._memory.id, name, text)
        self._client.set_terminated(self._memory.id, "FAILED" if summary is None else "FINISHED")

    def _metrics(self, numbers: Mapping[str, float], step: int) -> list[Any]:
        now, metric = int(1000 * time.time()), self._mlflow.entities.Metric
        return [metric(re.sub(r"[^\w\-. /:]", "_", name), value, now, step) for name, value in numbers.items()]

    def _log(self, **entries: list[Any]) -> None:
        for kind, values in entries.items():
            for start in range(0, len(values), _MOST):
                self._client.log_batch(self._memory.id, **{kind: values[start : start + _MOST]})


def _is_uri(place: str) -> bool:
    return ":" in place or place == "databricks"
