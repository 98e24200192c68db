"""The keys and files of a federation over a network.

- ``certificates``: keys, certificates and secrets, a folder for each role.
- ``certs``: the command of ``make certs``.
- ``compose_nodes``: ``docker-compose.yml`` for another number of nodes.
"""

from __future__ import annotations

from fedbn_flwr.lab.deployment.certificates import make_certificates

__all__ = ["make_certificates"]
