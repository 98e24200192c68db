"""Threads with a time limit, members of barriers, and certificates."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedbn_flwr.transport import Dropped, Member, Reducer, RetryStep

PATIENCE = 20


@pytest.fixture
def at_once() -> Iterator[Callable[..., list[Any]]]:
    """``at_once(f, g, ...)``: call all in threads; their results, or what they raised, in order."""
    pool = ThreadPoolExecutor(16)

    def run(*functions: Callable[[], Any]) -> list[Any]:
        futures: Sequence[Future[Any]] = [pool.submit(function) for function in functions]
        return [future.exception(PATIENCE) or future.result() for future in futures]

    yield run
    pool.shutdown(wait=False, cancel_futures=True)


@pytest.fixture
def members() -> Callable[..., Mapping[int, Member]]:
    """``members(3, 5)``: nodes 100, 101 with 3 and 5 examples, batches of 2 and 3."""

    def make(*weights: float) -> Mapping[int, Member]:
        return {100 + i: Member(weight, 2 + i, f"node {100 + i}") for i, weight in enumerate(weights)}

    return make


@pytest.fixture
def steps() -> Callable[..., Any]:
    """``steps(reducer, tensors)``: a client's whole step, repeated after RetryStep; (answers, union, attempts)."""

    def run(reducer: Reducer, exchanges: Mapping[str, Any]) -> Any:
        attempts = 0
        while True:
            attempts += 1
            try:
                union = reducer.begin()
                answers = {tag: reducer.reduce(tag, tensor) for tag, tensor in exchanges.items()}
            except RetryStep:
                continue
            except Dropped as error:
                return error
            reducer.close()
            return answers, union, attempts

    return run


def _sign(name: str, issuer: tuple[Any, Any] | None, *extensions: Any) -> tuple[Any, Any]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer[0].subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(issuer[1] if issuer else key, hashes.SHA256()), key


@pytest.fixture
def tls_dir(tmp_path: Path) -> Callable[[str], Path]:
    """``tls_dir(name)``: a folder with a CA of its own, and its certificate and key for 127.0.0.1."""

    def make(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        ca = _sign(f"CA {name}", None, x509.BasicConstraints(ca=True, path_length=None))
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        certificate, key = _sign("server", ca, names)
        pem = serialization.Encoding.PEM
        (folder / "ca.crt").write_bytes(ca[0].public_bytes(pem))
        (folder / "server.crt").write_bytes(certificate.public_bytes(pem))
        form = serialization.PrivateFormat.PKCS8
        (folder / "server.key").write_bytes(key.private_bytes(pem, form, serialization.NoEncryption()))
        return folder

    return make
