"""Exit with 0 where a service answers: ``health.py URL [CA]``, URL ``https://...`` or ``grpc://host:port``."""

from __future__ import annotations

import ssl
import sys
import urllib.request


def main(url: str, ca: str | None = None) -> None:
    """Raise unless the service answers within 5 seconds."""
    if url.startswith("grpc://"):
        import grpc
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        with grpc.insecure_channel(url.removeprefix("grpc://")) as channel:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        return
    with urllib.request.urlopen(url, timeout=5, context=ssl.create_default_context(cafile=ca)):
        pass


if __name__ == "__main__":
    main(*sys.argv[1:])
