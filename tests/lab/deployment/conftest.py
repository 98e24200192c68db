"""Fixtures over a network, with a federation of processes per module."""

from __future__ import annotations

import os
import random
import shutil
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from apps.local_federation import LocalFederation, make_certificates
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.runs.run import run
from tests.support.checkout import ROOT
from tests.support.network import settings_for
from tests.support.options import kebab
from tests.support.runs import QUICK, summary_of


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(404)  # with a date, as every answer
        self.end_headers()

    def log_message(self, *words: object) -> None:
        """Write nothing."""


@pytest.fixture(scope="session")
def certs(tmp_path_factory) -> Path:
    """A federation's certificates, for one node."""
    folder = tmp_path_factory.mktemp("federation") / "certs"
    make_certificates(folder, 1)
    return folder


@pytest.fixture
def serve() -> Iterator[Callable]:
    """Provide ``serve(FOLDER)`` to start an HTTPS server, and to return its port.

    The folder has ``server.crt`` and ``server.key``; None means HTTP.
    """
    servers = []

    def start(folder: Path | None) -> int:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _Answer)
        server.handle_error = lambda *_: None
        if folder:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(folder / "server.crt", folder / "server.key")
            server.socket = context.wrap_socket(
                server.socket, server_side=True, do_handshake_on_connect=False
            )
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        servers.append(server)
        return server.server_port

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


NODES = 3
SETTINGS = {**QUICK, "num-server-rounds": 3, "eval-every": 3}


@pytest.fixture(scope="module")
def scratch(await_end) -> Iterator[Path]:
    """Provide a folder, and check that all its processes end with the tests.

    A process belongs to the folder if its arguments or environment contain the path.
    """
    folder = Path(tempfile.mkdtemp(prefix="fedbn-net-", dir="/tmp"))
    home = Path(os.environ["FLWR_HOME"])
    before = {*home.rglob("*")}
    yield folder
    assert await_end(folder) == [], "nothing is left running"
    assert {*home.rglob("*")} == before, "Flower's home is untouched"
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def federation(scratch, request) -> Iterator[LocalFederation]:
    """A SuperLink, its SuperExec, and ``NODES`` or three SuperNodes with theirs."""
    nodes = getattr(request.module, "NODES", NODES)
    # below the ports that a system assigns
    port = random.Random().randrange(20000, 32000, 100)
    make_certificates(scratch / "certs", nodes)
    found = LocalFederation(scratch / "net", scratch / "certs", nodes, port, ())
    found.environment |= {
        "MPLCONFIGDIR": str(scratch / "matplotlib"),
        "PYTHONPATH": str(ROOT),
    }
    with closing(found):
        found.start()
        yield found


@pytest.fixture
def networked(federation, tmp_path) -> Callable:
    """Provide ``networked(strategy=..., ...)`` to return a networked run's summary."""

    def do(**settings) -> dict:
        out = tmp_path / "network"
        given = {**SETTINGS, **kebab(settings), "out": str(out)}
        federation.run(settings_for(federation, given))
        return summary_of(out)

    return do


@pytest.fixture
def in_process(tmp_path) -> Callable:
    """Provide ``in_process(strategy=..., ...)`` for the same run in this process.

    It returns the summary.
    """

    def do(**settings) -> dict:
        out = Path(tempfile.mkdtemp(dir=tmp_path))
        return run(Config.make({**SETTINGS, **kebab(settings)}), out)

    return do
