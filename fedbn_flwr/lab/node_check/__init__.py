"""``fedbn-flwr check-node``: what a site finds out before it joins a federation;
nothing of it is sent.
"""

from __future__ import annotations

from fedbn_flwr.lab.node_check.check import check_node
from fedbn_flwr.lab.node_check.connection import Connection
from fedbn_flwr.lab.node_check.page import Finding, Page

__all__ = ["Connection", "Finding", "Page", "check_node"]
