"""``fedbn-flwr check-node``: what a site finds out before it joins; nothing is sent.

- ``check``: the steps: config, data, a short round, the way to the server.
- ``trial_rounds``: the short round, a federation of this node alone.
- ``connection``: the way to the server.
- ``page``: what was found, as text.
"""

from __future__ import annotations

from fedbn_flwr.lab.node_check.check import check_node
from fedbn_flwr.lab.node_check.connection import Connection
from fedbn_flwr.lab.node_check.page import Finding, Page

__all__ = ["Connection", "Finding", "Page", "check_node"]
