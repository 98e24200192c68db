"""The run: what the server knows for longer than a round. No round is played here.

In the order in which to read them:

- ``report``: what a round tells of itself, and the averages of its metrics.
- ``nodes``: which clients are there, which of them are drawn, how one joins.
- ``kept``: what the clients keep between rounds, as far as the server knows it.
- ``protection``: the place where privacy may stand between replies and methods; empty.
- ``run``: the state of a run, which has one of each of these, and its checkpoint.
- ``failures``: losses that are not finite, too few replies, and how a run ends by them.
- ``recording``: what a listener of a run is told.

Not here: what happens in a round (``server.rounds``); a method's own state and the
settings (``server.methods``); a lost client's message, which is read in
``server.rounds.replies``; protections (``privacy``); files (``lab.output``).
"""
