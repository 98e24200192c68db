"""The way to the server: address, certificate and the node's key. Nothing but one activation of the key is sent."""

from __future__ import annotations

import datetime
import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
from cryptography import x509

from fedbn_flwr.compat.node_key import (
    OTHER_FLOWER,
    REFUSED,
    RefusedKey,
    private_key,
    public_bytes,
    try_key,
)
from fedbn_flwr.lab.node_check.page import Finding, fault, ok, untried, warning

__all__ = ["Connection", "check_connection", "supernode_with"]

_SECONDS = 10.0
_SOON = 30  # days
_PROGRAM = "flower-supernode"  # a script: "python flower-supernode", or by its name
_KEY_OPTION = "--auth-supernode-private-key"


@dataclass(frozen=True)
class Connection:
    """How the node reaches the server, as ``flower-supernode`` is told.

    Attributes:
        address: ``host:port`` of the SuperLink; "" = it is not tried.
        root_certificates: file of ``--root-certificates``; None = without TLS, or those of the system.
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
        yield untried("address", "no server was named: add --superlink HOST:PORT to try the way to it.")
        return
    host, _, port = connection.address.rpartition(":")
    if not host or not port.isdecimal():
        yield fault("address", f"--superlink={connection.address!r} is not HOST:PORT.")
        return
    host = host.strip("[]")
    try:
        with socket.create_connection((host, int(port)), timeout=_SECONDS):
            pass
    except (OSError, OverflowError) as error:
        yield fault(
            "address",
            f"{connection.address} cannot be reached: {error}. Check the name and the port, that the server runs, and "
            "that the firewall lets this machine connect there.",
        )
        return
    yield ok("address", f"{connection.address} answers.")
    certificates: bytes | None = None
    if connection.insecure:
        yield warning("certificate", "--insecure: without TLS anybody on the way can read and change what is sent.")
    else:
        certificates, findings = _certificates(connection, host, int(port))
        yield from findings
        if certificates is None:
            yield untried("key", "not tried without a certificate that can be trusted.")
            return
    yield _key(connection, certificates)


def _certificates(connection: Connection, host: str, port: int) -> tuple[bytes | None, list[Finding]]:
    """Return the CA's certificate in PEM, None if the server cannot be trusted with it, and what was found."""
    if connection.root_certificates is None:
        return None, [fault("certificate", "name the server's CA: --root-certificates FILE (or --insecure).")]
    path = connection.root_certificates
    try:
        content = path.read_bytes()
        context = ssl.create_default_context(cadata=content.decode())
    except (OSError, ValueError, ssl.SSLError) as error:
        return None, [fault("certificate", f"{str(path)!r} cannot be read as certificates in PEM: {error}.")]
    try:
        with (
            socket.create_connection((host, port), timeout=_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            certificate = x509.load_der_x509_certificate(secure.getpeercert(binary_form=True) or b"")
    except ssl.SSLCertVerificationError as error:
        return None, [
            fault(
                "certificate",
                f"the certificate of {connection.address} is refused: {error.verify_message}. Use the ca.crt that "
                "belongs to this server, and a name that its certificate has; check this machine's clock.",
            )
        ]
    except (OSError, ValueError) as error:
        return None, [fault("certificate", f"{connection.address} does not speak TLS: {error}. Check the port.")]
    left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    text = f"that of {connection.address} is signed by {path.name}, and valid for {left.days} more days."
    return content, [(warning if left.days < _SOON else ok)("certificate", text)]


def _key(connection: Connection, certificates: bytes | None) -> Finding:
    """Return what the one activation of the key finds."""
    if connection.key is None:
        return untried("key", "no key was named: add --key FILE where the server asks for one.")
    try:
        key = private_key(connection.key.read_bytes())
    except (OSError, ValueError) as error:
        return fault(
            "key",
            f"{str(connection.key)!r} cannot be read as a node's key: {error}. Needed is the private key of the pair "
            "whose public one is registered, an OpenSSH file on the curve P-384 without a password.",
        )
    if process := supernode_with(public_bytes(key)):
        return untried("key", f"it is online: process {process} on this machine is a SuperNode with this key.")
    try:
        try_key(connection.address, certificates, key)
    except RefusedKey as error:
        if error.code == REFUSED:
            return fault(
                "key",
                "the server refuses it: it is not registered there, or a SuperNode elsewhere is online with it; "
                "Flower's answer is the same. On the server: flwr supernode list, and flwr supernode register KEY.pub. "
                "After a SuperNode was killed its key is refused for about 44 s.",
            )
        code = "versions" if error.code == OTHER_FLOWER else "key"
        return fault(code, f"the server refuses this node: {error}")
    except (httpx.HTTPError, ValueError) as error:
        return fault("key", f"{connection.address} does not answer as a SuperLink: {error}. Check the port.")
    return ok("key", "the server knows it: it was activated once, and the activation was ended at once.")


def supernode_with(public: bytes, processes: Path = Path("/proc")) -> int:
    """Return the id of a SuperNode's process on this machine that has this key; 0 without one.

    In a container, the processes of other containers are not seen.
    """
    for folder in processes.glob("[0-9]*"):
        with suppress(OSError, ValueError):  # it has ended, belongs to somebody else, or has no such key
            words = [word.decode(errors="replace") for word in (folder / "cmdline").read_bytes().split(b"\0")]
            if any(Path(word).name == _PROGRAM for word in words[:2]) and (name := _value(words, _KEY_OPTION)):
                path = (folder / "cwd").resolve() / Path(name).expanduser()
                if public_bytes(private_key(path.read_bytes())) == public:
                    return int(folder.name)
    return 0


def _value(words: list[str], option: str) -> str:
    """Return the value of an option in the words of a command; "" without it."""
    for at, word in enumerate(words):
        if word == option and at + 1 < len(words):
            return words[at + 1]
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return ""
