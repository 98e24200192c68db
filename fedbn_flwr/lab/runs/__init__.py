"""Runs in each engine.

- ``run.py`` checks a run and starts it in its engine, in process or in workers.
- ``serve.py`` is the server's side of a federated run from top to bottom: the wait for
  nodes, the data, the strategy, the rounds.
  ``lab/results/result_writer.py`` records the rounds.
- ``node.py`` makes a node's client. Over a network, ``node_guard.py`` guards the node.
  ``default_app.py`` is both sides as a Flower app.
- ``check_start.py`` refuses paths, packages, devices and models that a run cannot use.
"""
