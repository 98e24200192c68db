"""The server code that all strategies share, in three packages and three modules.

Each imports only from those before it:

- ``methods``: everything that the author of a method needs.
- ``runs``: the server's knowledge that lasts longer than a round.
- ``rounds``: sending messages, reading replies, computing the next model.
- ``flower_calls``: Flower's calls, as an adapter around the rounds.
- ``strategy``: the constructor, the loop of ``start``, and checkpoints.
"""
