"""A wrong name or an expired certificate ends each program with the reason.

A plain TLS connection gives the expected reason.
"""

from __future__ import annotations

import runpy
import shlex
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.checkout import ROOT

COMMAND = next(
    line
    for line in (ROOT / "docs/deployment.md").read_text().splitlines()
    if line.startswith("openssl s_client")
)
"""The page's command before a site joins."""


@pytest.fixture(scope="module")
def expired(certs, tmp_path_factory) -> Path:
    """A folder with a certificate of the right names that ended yesterday."""
    folder = tmp_path_factory.mktemp("expired")
    shutil.copy(certs / "superlink/server.key", folder)
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    (folder / "empty").write_text("[req]\ndistinguished_name=dn\n[dn]\n")
    ca = f"-CA {certs}/ca/ca.crt -CAkey {certs}/ca/ca.key -set_serial 5"
    for words in (
        "req -new -key server.key -subj /CN=x -config empty -out request",
        f"x509 -req -in request -days -1 -extfile names {ca} -out server.crt",
    ):
        command = ["openssl", *words.split()]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture(params=["right", "wrong name", "wrong address", "expired"])
def server(request, certs, serve, expired) -> tuple[str, int, str]:
    """Serve a certificate, and return host, port and the reason of a refusal."""
    port = serve(expired if request.param == "expired" else certs / "superlink")
    host = {"wrong name": "fl.example.org", "wrong address": "127.0.0.2"}
    name = host.get(request.param, "127.0.0.1")
    context = ssl.create_default_context(cafile=certs / "cli/ca.crt")
    with socket.create_connection(("127.0.0.1", port)) as plain:
        try:
            context.wrap_socket(plain, server_hostname=name).close()
        except ssl.SSLCertVerificationError as error:
            return name, port, error.verify_message
    return name, port, ""


def test_the_command_of_the_page_tries_name_and_dates(certs, server) -> None:
    name, port, reason = server
    command = COMMAND.replace("certs/node-1", str(certs / "node-1"))
    command = command.replace("fl.example.org:8000", f"127.0.0.1:{port}")
    command = command.replace("fl.example.org", name)
    if not name.endswith("org"):
        command = command.replace("-verify_hostname", "-verify_ip")
    words = shlex.split(command.partition("<")[0])
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True)
    assert done.returncode == bool(reason)


@pytest.fixture
def connection(certs, server, tmp_path, monkeypatch) -> str:
    """Return the name of a connection to the server in Flower's config."""
    name, port, _ = server
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *more, **how: resolve("127.0.0.1", *more, **how),
    )
    config = f'[superlink.there]\naddress = "{name}:{port}"\n'
    config += f'root-certificates = "{certs}/cli/ca.crt"\n'
    (tmp_path / "config.toml").write_text(config)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    return "there"


def test_the_nodes_are_not_registered_for_this_reason(
    certs, server, connection
) -> None:
    main: Callable = runpy.run_path(str(ROOT / "docker/register.py"))["main"]
    with pytest.raises(SystemExit) as refused:
        main(connection, str(certs / "cli"))
    assert server[2] in str(refused.value)


def test_a_run_does_not_start_for_this_reason(
    server, connection, tmp_path, monkeypatch, capfd
) -> None:
    flwr = tmp_path / "flwr"
    flwr.write_text("#!/bin/sh\necho Connection to the SuperLink is unavailable.\n")
    flwr.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    main: Callable = runpy.run_path(str(ROOT / "docker/run.py"))["main"]
    assert main("app", connection) == 1
    *_, last = capfd.readouterr().out.splitlines()
    assert server[2] in last
