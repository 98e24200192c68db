"""The server half that all strategies share, in three rooms and a door.

Each imports from those before it, and never from those after it:

- ``methods``: what a writer of a method needs.
- ``runs``: what the server knows for longer than a round.
- ``rounds``: messages out, replies in, the next model.
- ``strategy``: Flower's calls, and the loop of ``start``.
"""
