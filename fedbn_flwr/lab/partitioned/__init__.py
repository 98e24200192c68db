"""The data of a run, split over its clients.

- ``partitioned_data``: the split of a config, the same on every node, and the training,
  validation and test data of each client. Other examples for a client start there.
- ``counts``: what is reported and refused of a split, and of own data that changed.
- ``splitting``: the tables and the picture of ``fedbn-flwr partition``.

Which clients a round trains and tests is decided in ``server.rounds``.
"""
