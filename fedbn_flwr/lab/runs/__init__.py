"""Runs in each engine.

- ``run.py``: a run in process or in workers; ``simulation.py``, ``cluster.py`` and
  ``centralized.py`` are the other ways to run it.
- ``start_checks.py``, ``serve.py``, ``node.py``, ``app.py``: the checks before it, its
  server, its clients, and both as a Flower app.
- ``inspection.py`` predicts what a method does with a model.
"""
