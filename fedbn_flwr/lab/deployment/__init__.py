"""What a federation over a network needs: certificates and keys, and
``docker-compose.yml`` for its nodes.
"""

from __future__ import annotations

from fedbn_flwr.lab.deployment.certificates import make_certificates

__all__ = ["make_certificates"]
