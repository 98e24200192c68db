"""Experiments: typed configs, runs in each engine, their folders, studies.

- ``config``: the settings of a run and what is refused.
- ``data``: the data of a run, its split over the clients and the report on it.
- ``run.py``, ``setup.py``, ``start_checks.py``, ``serve.py``, ``node.py``: a run, its parts, the checks before it, its
  server and its clients; ``simulation.py`` with ``flower_log.py``, ``cluster.py`` with ``cluster_clients.py``, and
  ``centralized.py`` are the other ways to run it; ``early_stopping.py`` ends one.
- ``output``: the folder of a run: metrics, curves, checkpoints, model, summary. ``trackers`` shows a run elsewhere.
- ``finished_run``: evaluate and export the model of a run.
- ``studies``: grids of runs, their results and tables.
- ``report``: the HTML page of a run or a study.
- ``inspection.py`` predicts what a method does with a model; ``doctor.py`` finds what went wrong with BatchNorm.
"""

from __future__ import annotations

from fedbn_flwr.experiment.config import Config

__all__ = ["Config"]
