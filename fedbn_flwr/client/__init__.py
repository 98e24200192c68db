"""The client code.

It has ``TorchClient``, the mod, and hooks for other training loops.

A client refuses its optimizer and its steps by the rows of the methods
(``strategies.refuse_on_client``). ``watch`` refuses a training loop that leaves out a
call, and ``model_door`` a model that does not fit the server's model.
"""

from __future__ import annotations

from fedbn_flwr.client.message_app import client_app
from fedbn_flwr.client.torch_client import TorchClient

__all__ = ["TorchClient", "client_app"]
