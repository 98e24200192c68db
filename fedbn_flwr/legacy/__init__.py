"""Flower's older loop, in which messages number their arrays.

In reading order:

- ``legacy_strategy``: ``to_legacy``, the strategies in this loop.
- ``legacy_client``: ``to_client_fn``, an app with its mods for ``start_client``.
- ``legacy_messages``: the loop's messages as messages with named arrays.
- ``secure_aggregation``: the average that the loop's secure aggregation returns.
"""
