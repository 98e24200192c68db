"""The data of a run, split over its clients.

- ``partitioned_data``: the split of a config, the same on every node, and the training,
  validation and test data of each client. To give clients other examples, start there.
- ``counts``: reports and refusals of a split, and of own data that changed.

``server.rounds`` determines the clients that a round trains and tests.
"""
