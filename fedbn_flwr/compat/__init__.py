"""The adapter to Flower's internals, which may change.

- ``flower``: all uses of Flower's internals in the core.
- ``node_key``, ``node_list``, ``secret_sharing``: internals that only one module uses.
"""
