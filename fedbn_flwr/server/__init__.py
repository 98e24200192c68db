"""The server code that all strategies share, in three packages and two modules.

Each imports only from those before it:

- ``averaging``: the average of clients' states.
- ``methods``: everything that the author of a method needs.
- ``runs``: the server's knowledge that lasts longer than a round.
- ``rounds``: sending messages, reading replies, computing the next model.
- ``strategy``: Flower's calls, and the loop of ``start``.
"""
