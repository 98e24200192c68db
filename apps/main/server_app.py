"""The ServerApp of the default app; its code is in ``fedbn_flwr``."""

from fedbn_flwr.app import server_app as app

__all__ = ["app"]
