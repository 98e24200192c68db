"""The way to the server: address, certificate and the node's key. Nothing but one
activation of the key is sent.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from fedbn_flwr.compat.node_key import REFUSED, RefusedKey, private_key, try_key
from fedbn_flwr.lab.node_check.page import Finding

__all__ = ["Connection", "check_connection"]

_SECONDS = 10.0


@dataclass(frozen=True)
class Connection:
    """How the node reaches the server, as ``flower-supernode`` is told.

    Attributes:
        address: ``host:port`` of the SuperLink; "" = it is not tried.
        root_certificates: file of ``--root-certificates``.
        key: file of ``--auth-supernode-private-key``; None = the SuperLink needs none.
        insecure: without TLS.
    """

    address: str = ""
    root_certificates: Path | None = None
    key: Path | None = None
    insecure: bool = False


def check_connection(connection: Connection) -> Iterator[Finding]:
    """Yield what is found about the way to the server, as far as it goes."""
    if not connection.address:
        yield Finding(
            "not tried",
            "address",
            "no server was named: add --superlink HOST:PORT to try the way to it.",
        )
        return
    host, _, port = connection.address.rpartition(":")
    if not host or not port.isdecimal():
        yield Finding(
            "fault", "address", f"--superlink={connection.address!r} is not HOST:PORT."
        )
        return
    place = (host.strip("[]"), int(port))
    try:
        socket.create_connection(place, timeout=_SECONDS).close()
    except (OSError, OverflowError) as error:
        advice = "Check the name and the port, that the server runs, and the firewall."
        yield Finding(
            "fault",
            "address",
            f"{connection.address} cannot be reached: {error}. {advice}",
        )
        return
    yield Finding("ok", "address", f"{connection.address} answers.")
    trusted = _certificate(connection, place)
    yield trusted
    if trusted.level != "fault":
        yield _key(connection)


def _certificate(connection: Connection, place: tuple[str, int]) -> Finding:
    """Return whether the server's certificate is signed by the CA that the node has."""
    path = connection.root_certificates
    if connection.insecure:
        return Finding(
            "warning",
            "certificate",
            "--insecure: anybody on the way can read and change what is sent.",
        )
    if path is None:
        return Finding(
            "fault",
            "certificate",
            "name the server's CA: --root-certificates FILE (or --insecure).",
        )
    try:
        context = ssl.create_default_context(cadata=path.read_text())
    except (OSError, ValueError, ssl.SSLError) as error:
        return Finding(
            "fault",
            "certificate",
            f"{str(path)!r} cannot be read as certificates in PEM: {error}.",
        )
    try:
        with (
            socket.create_connection(place, timeout=_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=place[0]),
        ):
            return Finding(
                "ok",
                "certificate",
                f"that of {connection.address} is signed by {path.name}.",
            )
    except ssl.SSLCertVerificationError as error:
        text = (
            f"is refused: {error.verify_message}. Use this server's ca.crt, and a name"
            " that its certificate has"
        )
    except OSError as error:
        text = f"cannot be read: {error}. Check the port"
    return Finding(
        "fault", "certificate", f"the certificate of {connection.address} {text}."
    )


def _key(connection: Connection) -> Finding:
    """Return what the one activation of the key finds."""
    if connection.key is None:
        return Finding(
            "not tried",
            "key",
            "no key was named: add --key FILE where the server asks for one.",
        )
    try:
        key = private_key(connection.key.read_bytes())
    except (OSError, ValueError) as error:
        needed = (
            "Needed is the private key of the registered pair, an OpenSSH file on P-384"
            " without a password."
        )
        return Finding(
            "fault",
            "key",
            f"{str(connection.key)!r} cannot be read as a node's key: {error}."
            f" {needed}",
        )
    path = None if connection.insecure else connection.root_certificates
    try:
        try_key(connection.address, path.read_bytes() if path else None, key)
    except RefusedKey as error:
        if error.code != REFUSED:
            return Finding("fault", "key", f"the server refuses this node: {error}")
        causes = (
            "it is not registered there, or a SuperNode is online with it; Flower's"
            " answer is the same"
        )
        remedy = (
            "On the server: flwr supernode list, and flwr supernode register KEY.pub"
        )
        late = "A killed SuperNode's key is refused for about 44 s"
        return Finding(
            "fault", "key", f"the server refuses it: {causes}. {remedy}. {late}."
        )
    except (httpx.HTTPError, ValueError) as error:
        return Finding(
            "fault",
            "key",
            f"{connection.address} does not answer as a SuperLink: {error}.",
        )
    return Finding(
        "ok",
        "key",
        "the server knows it: it was activated once, and the activation was ended at"
        " once.",
    )
