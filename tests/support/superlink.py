"""A SuperLink's Fleet API for one key, with the answers of Flower 1.41."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    DeactivateNodeRequest,
    DeactivateNodeResponse,
)

ACTIVATION_FAILED = 2004
NODE_ID = 77


class SuperLink:
    """The registered keys, the online keys, and all requests as (path, content)."""

    def __init__(self) -> None:
        self.registered: set[bytes] = set()
        self.online: set[bytes] = set()
        self.requests: list[tuple[str, bytes]] = []
        self.refuses = 0  # an error code for every activation
        self.address = ""

    def activate(self, content: bytes) -> tuple[int, bytes]:
        key = ActivateNodeRequest.FromString(content).public_key
        code = self.refuses or (
            0 if key in self.registered - self.online else ACTIVATION_FAILED
        )
        if code:
            return (
                400,
                json.dumps(
                    {"code": code, "detail": "Failed to activate SuperNode."}
                ).encode(),
            )
        self.online.add(key)
        return 200, ActivateNodeResponse(node_id=NODE_ID).SerializeToString()

    def deactivate(self, content: bytes) -> tuple[int, bytes]:
        assert DeactivateNodeRequest.FromString(content).node_id == NODE_ID
        self.online.clear()
        return 200, DeactivateNodeResponse().SerializeToString()


@contextmanager
def superlink(certificates: Path | None = None) -> Iterator[SuperLink]:
    """Serve on loopback, and over TLS if a folder of certificates is given.

    The folder has ``server.crt`` and ``server.key``.
    """
    state = SuperLink()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            state.requests.append((self.path, content))
            answer = {
                "/v1/fleet/activate-node": state.activate,
                "/v1/fleet/deactivate-node": state.deactivate,
            }
            status, body = answer[self.path](content)
            self.send_response(status)
            self.send_header(
                "content-type",
                "application/x-protobuf" if status == 200 else "application/json",
            )
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if certificates:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(
            certificates / "server.crt", certificates / "server.key"
        )
        server.socket = context.wrap_socket(server.socket, server_side=True)
    state.address = f"127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
