"""Certificates, keys and secrets of a federation, in a folder for each role.

- ``ca/``: ``ca.key`` signs all certificates and has no other use. Do not copy it to the
  machines.
- ``superlink/``: ``server.crt``, ``server.key``, ``superexec.secret``.
- ``serverapp/``: ``superexec.secret``.
- ``channel/``: ``server.crt``, ``server.key`` of FedTAN's channel (``fedtan-tls-dir``).
- ``cli/``: ``node-N.pub``, to register the nodes.
- ``node-N/``: ``node.key`` (the node's identity), ``server.crt``, ``server.key``,
  ``superexec.secret``.
- ``clientapp-N/``: ``superexec.secret``.

Each folder except ``ca/`` also has ``ca.crt``. With ``ca.crt``, a role verifies the
certificates of other roles. A SuperExec and its SuperLink or SuperNode have the same
secret. All keys are elliptic-curve keys on P-384, as Flower requires for nodes.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedbn_flwr.atomic_file import write_atomically
from fedbn_flwr.errors import ConfigError

# the service of docker-compose.yml whose ServerApp opens FedTAN's channel
_CHANNEL_HOST = "superexec-serverapp"
_LOCAL = ("localhost", "127.0.0.1", "::1")
_SECRET_BYTES = 32
Key = ec.EllipticCurvePrivateKey


def make_certificates(
    folder: Path, num_nodes: int, hosts: Sequence[str] = (), days: int = 365
) -> None:
    """Write the CA, server certificates, node keys and SuperExec secrets.

    Args:
        folder: new or empty; existing files are never overwritten.
        num_nodes: number of nodes; they are numbered from 1.
        hosts: names and addresses of the server, in addition to the names of its
            services. The certificate of a node must not have these names, because the
            node could then claim to be the server.
        days: number of days until the certificates expire.

    Raises:
        ConfigError: the folder is not empty, or a number is out of range.
    """
    if num_nodes < 1 or days < 1:
        raise ConfigError(f"num_nodes={num_nodes} and days={days} must be at least 1")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{str(folder)!r} is in use, and keys are never overwritten, since running"
            " nodes depend on them. --add N makes keys of one more node, --renew new"
            " certificates for the same keys. For a new set, name another folder."
        )
    authority = _Authority(_new_key(), days)
    _write(folder / "ca/ca.key", _private(authority.key))
    _write(folder / "ca/ca.crt", authority.certificate)

    # Write the server's keys. The SuperLink and its SuperExec share a secret. It proves
    # that the SuperExec belongs to the SuperLink.
    superlink = secrets.token_bytes(_SECRET_BYTES)
    _role(folder / "superlink", authority, superlink, ["superlink", *hosts])
    _role(folder / "serverapp", authority, superlink)
    _role(folder / "channel", authority, None, [_CHANNEL_HOST, *hosts])
    _role(folder / "cli", authority, None)

    for number in range(1, num_nodes + 1):
        _node(folder, authority, number)


def add_node(folder: Path, number: int, days: int = 365) -> None:
    """Write the keys of one more node without changing another file.

    Raises:
        ConfigError: the node already has keys, the folder has no ``ca/ca.key``, or a
            number is out of range.
    """
    if number < 1:
        raise ConfigError(f"node {number}: nodes are counted from 1")
    authority = _authority_of(folder, days)
    there = [path for path in _paths_of_node(folder, number) if path.exists()]
    if there:
        raise ConfigError(
            f"node {number} has keys: {' '.join(map(str, there))}. To make new keys,"
            " remove these first."
        )
    # Keep the CA's certificate, because all other machines have it and would otherwise
    # need the new certificate.
    authority.certificate = (folder / "ca/ca.crt").read_bytes()
    _node(folder, authority, number)


def renew(folder: Path, hosts: Sequence[str] = (), days: int = 365) -> list[Path]:
    """Write new certificates for the same keys, and return the paths of these files.

    The machines may get the certificates one after the other. The authority keeps its
    key and its name, so old and new certificates verify each other.

    Args:
        folder: the folder of ``make_certificates``.
        hosts: names and addresses of the server, instead of its present names.
        days: number of days until the certificates expire.

    Raises:
        ConfigError: the folder has no ``ca/ca.key``, or a number is out of range.
    """
    authority = _authority_of(folder, days)
    renewed = []
    for path in sorted(folder.glob("*/*.crt")):
        content = authority.certificate
        if path.name == "server.crt":
            old = x509.load_pem_x509_certificate(path.read_bytes())
            names = _names_of(old)
            if hosts and path.parent.name in ("superlink", "channel"):
                names = [names[0], *hosts]
            key = _load_key(path.with_name("server.key"))
            content = authority.server(names, key)
        write_atomically(path, content, 0o644)
        renewed.append(path)
    return renewed


class _Authority:
    """A private certificate authority."""

    def __init__(self, key: Key, days: int) -> None:
        self.key = key
        self._until = datetime.timedelta(days=days)
        self._name = _name("fedbn-flwr federation CA")
        # x509 requires all arguments of KeyUsage. The CA's key signs certificates. With
        # path_length=0, a signed certificate cannot sign others.
        usage = x509.KeyUsage(
            digital_signature=False,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        builder = self._builder(self._name, self.key.public_key())
        builder = builder.add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        self.certificate = self._sign(builder.add_extension(usage, critical=True))

    def server(self, names: Sequence[str], key: Key) -> bytes:
        """Return a server's certificate (PEM) for DNS names and IP addresses."""
        alternatives = [_alternative(name) for name in dict.fromkeys([*names, *_LOCAL])]
        builder = self._builder(_name(names[0]), key.public_key())
        builder = builder.add_extension(
            x509.SubjectAlternativeName(alternatives), critical=False
        )
        builder = builder.add_extension(
            x509.BasicConstraints(ca=False, path_length=None), critical=True
        )
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        return self._sign(builder.add_extension(usage, critical=False))

    def _builder(
        self, name: x509.Name, public: ec.EllipticCurvePublicKey
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        subject = x509.SubjectKeyIdentifier.from_public_key(public)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(
            self.key.public_key()
        )
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            # valid from 5 minutes ago, because the clocks of machines differ
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + self._until)
            .add_extension(subject, critical=False)
            .add_extension(issuer, critical=False)
        )

    def _sign(self, builder: x509.CertificateBuilder) -> bytes:
        return builder.sign(self.key, hashes.SHA384()).public_bytes(Encoding.PEM)


def _authority_of(folder: Path, days: int) -> _Authority:
    """Return the authority with the key in a folder, and with a new certificate."""
    path = folder / "ca/ca.key"
    if days < 1:
        raise ConfigError(f"days={days} must be at least 1")
    if not path.is_file():
        raise ConfigError(
            f"{path} is missing, but it is needed to sign certificates. Name the folder"
            " of `make certs`."
        )
    return _Authority(_load_key(path), days)


def _paths_of_node(folder: Path, number: int) -> list[Path]:
    names = (f"node-{number}", f"clientapp-{number}", f"cli/node-{number}.pub")
    return [folder / name for name in names]


def _node(folder: Path, authority: _Authority, number: int) -> None:
    """Write the files of a node."""
    own, clientapp, registered = _paths_of_node(folder, number)
    secret, key = secrets.token_bytes(_SECRET_BYTES), _new_key()
    _role(own, authority, secret, [f"supernode-{number}"])
    _write(own / "node.key", _private(key, PrivateFormat.OpenSSH))
    # The server gets only the node's public key, and registers the node with this key.
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    _write(registered, public + f" node-{number}\n".encode())
    _role(clientapp, authority, secret)


def _role(
    folder: Path, authority: _Authority, secret: bytes | None, names: Sequence[str] = ()
) -> None:
    """Write ``ca.crt``, and the secret and the server files that the role needs.

    Args:
        folder: the folder for this role's files, e.g. ``superlink``.
        authority: signs the server's certificate.
        secret: the SuperExec secret; None for a role without a secret.
        names: the names in the certificate of the role's server; if empty, no key and
            no certificate are written.
    """
    _write(folder / "ca.crt", authority.certificate)
    if secret is not None:
        _write(folder / "superexec.secret", secret)
    if names:
        key = _new_key()
        _write(folder / "server.key", _private(key))
        _write(folder / "server.crt", authority.server(names, key))


def _new_key() -> Key:
    return ec.generate_private_key(ec.SECP384R1())


def _load_key(path: Path) -> Key:
    return cast(Key, load_pem_private_key(path.read_bytes(), None))


def _private(key: Key, form: PrivateFormat = PrivateFormat.PKCS8) -> bytes:
    return key.private_bytes(Encoding.PEM, form, NoEncryption())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _names_of(certificate: x509.Certificate) -> list[str]:
    """Return the names in a server's certificate, except names such as localhost."""
    extension = certificate.extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    names = [str(alternative.value) for alternative in extension.value]
    return [name for name in names if name not in _LOCAL]


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write(path: Path, content: bytes) -> None:
    """Write a new file. Only its owner can read it, unless it ends in .crt or .pub."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    mode = 0o644 if path.suffix in (".crt", ".pub") else 0o600
    # Open the file with its final mode, so that a secret is never readable by others,
    # and refuse to overwrite a file.
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
