"""A federation over a network: certificates, and the services of ``docker-compose.yml`` as processes."""

from __future__ import annotations

from fedbn_flwr.lab.deployment.certificates import make_certificates
from fedbn_flwr.lab.deployment.federation import Federation
from fedbn_flwr.lab.deployment.runs import Outcome

__all__ = ["Federation", "Outcome", "make_certificates"]
