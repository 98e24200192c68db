"""Flower's older loop, with numbered arrays in its messages.

In reading order:

- ``legacy_strategy``: ``to_legacy`` adapts the strategies to this loop. Its ``ROWS``
  refuse methods that need other messages.
- ``legacy_client``: ``to_client_fn`` adapts an app with mods to ``start_client``.
- ``legacy_messages``: converts the loop's messages to messages with named arrays.
- ``secure_aggregation``: the average from the loop's secure aggregation.
"""
