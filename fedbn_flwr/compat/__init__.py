"""What depends on Flower's internals and on its legacy loop, which may change.

- ``flower``: all uses of Flower's internals in the core.
- ``node_key``, ``node_list``, ``secret_sharing``: internals that one reader alone
  takes.
- ``legacy_strategy``: ``to_legacy``, the strategies in Flower's older loop.
- ``secure_aggregation``: what that loop's secure aggregation returns.
"""
