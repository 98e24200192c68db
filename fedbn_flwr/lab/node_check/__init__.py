"""The command ``fedbn-flwr check-node``, for a site before it joins.

Nothing is sent.

- ``check``: the steps: config, data, a short round, the connection to the server.
- ``trial_rounds``: the short round, in a federation of only this node.
- ``connection``: the connection to the server.
- ``page``: the findings as text.
"""

from __future__ import annotations

from fedbn_flwr.lab.node_check.check import check_node
from fedbn_flwr.lab.node_check.connection import Connection
from fedbn_flwr.lab.node_check.page import Page, StepFinding

__all__ = ["Connection", "Page", "StepFinding", "check_node"]
