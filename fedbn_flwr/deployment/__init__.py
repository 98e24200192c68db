"""A federation over a network: certificates, and the services of ``docker-compose.yml`` as processes."""

from __future__ import annotations

from fedbn_flwr.deployment.certificates import make_certificates
from fedbn_flwr.deployment.federation import Federation
from fedbn_flwr.deployment.runs import Outcome

__all__ = ["Federation", "Outcome", "make_certificates"]
