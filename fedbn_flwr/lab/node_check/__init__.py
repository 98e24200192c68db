"""The command ``fedbn-flwr check-node``, for a site before it joins.

The command sends none of the site's data. It sends one activation of the node's key.

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
