"""The server code that all strategies share, in three packages and four modules.

Each imports only from those before it:

- ``averaging``: the average of clients' states.
- ``methods``: everything that the author of a method needs.
- ``runs``: the server's knowledge that lasts longer than a round.
- ``rounds``: sending messages, reading replies, computing the next model.
- ``loops``: the loop of ``start``, and its differences from all other loops.
- ``run_view``: the properties of a strategy that read its run.
- ``strategy``: Flower's calls.
"""
