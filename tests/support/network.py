"""Settings of runs over the processes of ``apps/local_federation.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from apps.local_federation import LocalFederation


def channel_port(federation: LocalFederation) -> int:
    """The port of FedTAN's channel, which is none of the federation's own."""
    return federation.port + 50


def settings_for(
    federation: LocalFederation, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings of a run, with address and certificates of FedTAN's channel where
    they ask for it.
    """
    if settings.get("fedtan-transport") != "channel":
        return dict(settings)
    address = f"127.0.0.1:{channel_port(federation)}"
    return {
        **settings,
        "fedtan-bind": address,
        "fedtan-tls-dir": str(federation.certs / "channel"),
    }
