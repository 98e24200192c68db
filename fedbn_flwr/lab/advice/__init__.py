"""The command ``fedbn-flwr advise``: which method suits these sites.

- ``candidates``: the methods to try, with the reason for each.
- ``halving``: short runs of all candidates, of which the better half continues.
- ``advise``: the whole command, and its answer in ``advice.json``.
"""
