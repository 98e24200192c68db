"""The server code that all strategies share, in three packages and three modules.

Each imports only from those before it:

- ``methods``: everything that the author of a method needs.
- ``runs``: the server's knowledge that lasts longer than a round.
- ``rounds``: sending messages, reading replies, computing the next model.
- ``loops``: the loop of ``start``, and how it differs from every other loop.
- ``run_view``: what a strategy tells its callers about its run.
- ``strategy``: Flower's calls.
"""
