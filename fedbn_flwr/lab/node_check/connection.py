"""The check of the connection to the server: address, certificate, the node's key.

The check sends the server only an activation of the key, and then its deactivation.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from fedbn_flwr.compat.node_key import REFUSED, RefusedKey, private_key, try_key
from fedbn_flwr.lab.node_check.page import StepFinding

_SECONDS = 10.0


@dataclass(frozen=True)
class Connection:
    """The options of ``flower-supernode`` for the connection to the server.

    Attributes:
        address: ``host:port`` of the SuperLink; "" skips the check.
        root_certificates: file of ``--root-certificates``.
        key: file of ``--auth-supernode-private-key``; None without a key.
        insecure: whether the connection has no TLS.
    """

    address: str = ""
    root_certificates: Path | None = None
    key: Path | None = None
    insecure: bool = False


def check_connection(connection: Connection) -> Iterator[StepFinding]:
    """Yield the findings about the connection to the server, up to the first fault."""
    # Check the address, and whether a server answers there.
    address = connection.address
    if not address:
        text = "no server was named. Add --superlink HOST:PORT to test the connection."
        yield StepFinding("not tried", "address", text)
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        yield StepFinding(
            "fault", "address", f"--superlink={address!r} is not HOST:PORT."
        )
        return
    place = (host.strip("[]"), int(port))
    try:
        socket.create_connection(place, timeout=_SECONDS).close()
    except (OSError, OverflowError) as error:
        text = (
            f"{address} cannot be reached: {error}. Check the name and the port, that"
            " the server runs, and the firewall."
        )
        yield StepFinding("fault", "address", text)
        return
    yield StepFinding("ok", "address", f"{address} answers.")

    # Use the key only if the server's certificate is right.
    trusted = _certificate(connection, place)
    yield trusted
    if trusted.level != "fault":
        yield _key(connection)


def _certificate(connection: Connection, place: tuple[str, int]) -> StepFinding:
    """Return the finding whether the node's CA has signed the server's certificate."""
    # Load the certificates that the node trusts.
    path = connection.root_certificates
    if connection.insecure:
        text = "--insecure: anybody on the way can read and change the messages."
        return StepFinding("warning", "certificate", text)
    if path is None:
        text = "name the server's CA by --root-certificates FILE (or use --insecure)."
        return StepFinding("fault", "certificate", text)
    try:
        context = ssl.create_default_context(cadata=path.read_text())
    except (OSError, ValueError, ssl.SSLError) as error:
        text = f"{str(path)!r} cannot be read as certificates in PEM: {error}."
        return StepFinding("fault", "certificate", text)

    # Check the server's certificate in the TLS handshake, before anything else is sent.
    try:
        with (
            socket.create_connection(place, timeout=_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=place[0]),
        ):
            text = f"{path.name} has signed the certificate of {connection.address}."
            return StepFinding("ok", "certificate", text)
    except ssl.SSLCertVerificationError as error:
        text = (
            f"is refused: {error.verify_message}. Use this server's ca.crt, and a name"
            " that its certificate has"
        )
    except OSError as error:
        text = f"cannot be read: {error}. Check the port"
    text = f"the certificate of {connection.address} {text}."
    return StepFinding("fault", "certificate", text)


def _key(connection: Connection) -> StepFinding:
    """Activate the node's key once at the server, and return the finding."""
    # Read the file.
    if connection.key is None:
        text = "no key was named. Add --key FILE if the server requires one."
        return StepFinding("not tried", "key", text)
    try:
        key = private_key(connection.key.read_bytes())
    except (OSError, ValueError) as error:
        text = (
            f"{str(connection.key)!r} cannot be read as a node's key: {error}. Use the"
            " private key of the registered pair, an OpenSSH file on P-384"
            " without a password."
        )
        return StepFinding("fault", "key", text)

    # Ask the server. Flower gives the same answer for two causes: an unknown key, and a
    # key that is in use.
    certificates = None
    if connection.root_certificates and not connection.insecure:
        certificates = connection.root_certificates.read_bytes()
    try:
        try_key(connection.address, certificates, key)
    except RefusedKey as error:
        if error.code != REFUSED:
            return StepFinding("fault", "key", f"the server refuses this node: {error}")
        text = (
            "the server refuses the key: it is not registered there, or a SuperNode is"
            " online with it (Flower's answer is the same). On the server, use flwr"
            " supernode list, and flwr supernode register KEY.pub. A killed SuperNode's"
            " key is refused for about 44 s."
        )
        return StepFinding("fault", "key", text)
    except (httpx.HTTPError, ValueError) as error:
        text = f"{connection.address} does not answer as a SuperLink: {error}."
        return StepFinding("fault", "key", text)
    text = (
        "the server accepts the key: it was activated once, and then deactivated"
        " immediately."
    )
    return StepFinding("ok", "key", text)
