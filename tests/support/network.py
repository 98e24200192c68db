"""Settings of runs over the processes of ``apps/local_federation.py``."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from apps.local_federation import LocalFederation

NETWORK = [pytest.mark.network, pytest.mark.slow, pytest.mark.xdist_group("network")]
"""The marks of tests over a network."""


def channel_port(federation: LocalFederation) -> int:
    """Return the port of FedTAN's channel, distinct from the federation's ports."""
    return federation.port + 50


def settings_for(federation: LocalFederation, settings: Mapping) -> dict:
    """Return the settings of a run.

    They include the address and certificates of FedTAN's channel if requested.
    """
    if settings.get("fedtan-transport") != "channel":
        return dict(settings)
    address = f"127.0.0.1:{channel_port(federation)}"
    return {
        **settings,
        "fedtan-bind": address,
        "fedtan-tls-dir": str(federation.certs / "channel"),
    }
