"""The server's knowledge that lasts longer than a round.

Read the modules in this order:

- ``round_report``: the report of a round, and the averages of its metrics.
- ``nodes``: the connected clients, the draw of a round, and how a client joins.
- ``kept``: the server's knowledge of the clients' local states.
- ``protection``: the interface for privacy between replies and methods, and the values
  that clients send in addition to their update.
- ``run_state``: the state of a run with all of these, and its checkpoint.
- ``failures``: non-finite losses, too few replies, and errors that end a run.

Other modules contain the course of a round (``server.rounds``), the settings and states
of methods (``server.methods``), the error messages of lost clients
(``server.rounds.replies``), protections (``privacy``), and files (``lab.results``).
"""
