"""The adapter to those internals of Flower that may change.

- ``flower``: the core's uses of Flower's internals.
- ``secret_sharing``: internals for only one module.
"""
