"""A federation over a network: certificates, and the services of ``docker-compose.yml`` as processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedbn_flwr.lazy import imported_when_used

if TYPE_CHECKING:
    from fedbn_flwr.lab.deployment.certificates import make_certificates
    from fedbn_flwr.lab.deployment.federation import Federation
    from fedbn_flwr.lab.deployment.runs import Outcome
else:  # certificates need cryptography alone
    _WHERE = {"Federation": "federation", "Outcome": "runs", "make_certificates": "certificates"}
    __getattr__, __dir__ = imported_when_used(__name__, _WHERE)

__all__ = ["Federation", "Outcome", "make_certificates"]
