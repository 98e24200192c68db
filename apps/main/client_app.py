"""The ClientApp of the default app; its code is in ``fedbn_flwr``."""

from fedbn_flwr.app import client_app as app

__all__ = ["app"]
