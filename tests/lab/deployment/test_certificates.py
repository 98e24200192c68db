"""The files of ``make certs``: permissions, purpose, and no overwriting."""

from __future__ import annotations

import os
import shutil
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.deployment.certificates import make_certificates


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates") / "certs"
    make_certificates(folder, 2, ["fl.example.org", "192.0.2.7"], days=30)
    return folder


def test_each_role_has_what_it_needs_and_no_more(certs: Path) -> None:
    server, secret = {"ca.crt", "server.crt", "server.key"}, {"superexec.secret"}
    expected = {
        "ca": {"ca.crt", "ca.key"},
        "superlink": server | secret,
        "serverapp": {"ca.crt"} | secret,
        "channel": server,
        "cli": {"ca.crt", "node-1.pub", "node-2.pub"},
        **{f"node-{n}": server | secret | {"node.key"} for n in (1, 2)},
        **{f"clientapp-{n}": {"ca.crt"} | secret for n in (1, 2)},
    }
    assert {
        path.name: {file.name for file in path.iterdir()} for path in certs.iterdir()
    } == expected


def test_only_the_owner_can_read_secrets(certs: Path) -> None:
    for path in certs.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        if path.is_dir():
            assert mode == 0o700, path
        else:
            assert mode == (0o600 if path.suffix in (".key", ".secret") else 0o644), (
                path
            )


def test_certificates_have_their_names_and_are_signed_by_the_ca(certs: Path) -> None:
    authority = x509.load_pem_x509_certificate((certs / "ca/ca.crt").read_bytes())
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    own = {
        "superlink": "superlink",
        "channel": "superexec-serverapp",
        "node-2": "supernode-2",
    }
    for role, name in own.items():
        found = x509.load_pem_x509_certificate(
            (certs / role / "server.crt").read_bytes()
        )
        found.verify_directly_issued_by(authority)
        names = found.extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        ).value
        # a node shall not pass for the server
        hosts = [] if role == "node-2" else ["fl.example.org"]
        addresses = [] if role == "node-2" else ["192.0.2.7"]
        assert names.get_values_for_type(x509.DNSName) == [name, *hosts, "localhost"]
        assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == [
            *addresses,
            "127.0.0.1",
            "::1",
        ]
        assert not found.extensions.get_extension_for_class(
            x509.BasicConstraints
        ).value.ca
        assert (found.not_valid_after_utc - found.not_valid_before_utc).days == 30
        ssl.create_default_context().load_cert_chain(
            certs / role / "server.crt", certs / role / "server.key"
        )


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")
def test_openssl_accepts_the_certificates(certs: Path) -> None:
    """With its strict rules, which are those of Python 3.13."""
    files = [
        str(certs / role / "server.crt") for role in ("superlink", "channel", "node-1")
    ]
    command = [
        "openssl",
        "verify",
        "-x509_strict",
        "-CAfile",
        str(certs / "ca/ca.crt"),
        *files,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_node_keys_are_p384_and_match_the_public_keys(certs: Path) -> None:
    keys = []
    for n in (1, 2):
        private = load_ssh_private_key(
            (certs / f"node-{n}/node.key").read_bytes(), None
        )
        public = load_ssh_public_key((certs / f"cli/node-{n}.pub").read_bytes())
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        assert private.curve.name == "secp384r1"
        assert private.public_key() == public
        keys.append(private.private_numbers().private_value)
    assert len(set(keys)) == 2


def test_a_superexec_shares_the_secret_of_its_own_server_only(certs: Path) -> None:
    secrets = {
        role: (certs / role / "superexec.secret").read_bytes()
        for role in ("superlink", "node-1", "node-2")
    }
    assert len(set(secrets.values())) == 3
    assert all(len(secret) == 32 for secret in secrets.values())
    assert (certs / "serverapp/superexec.secret").read_bytes() == secrets["superlink"]
    for n in (1, 2):
        assert (certs / f"clientapp-{n}/superexec.secret").read_bytes() == secrets[
            f"node-{n}"
        ]


def test_the_command_needs_cryptography_alone_and_overwrites_nothing(
    tmp_path: Path,
) -> None:
    """The keys are of the user in .env, never root: containers run as this user."""
    folder, env = tmp_path / "certs", tmp_path / ".env"
    env.write_text("NODE_1_DATA=/srv/a\nexport FEDBN_GID=5")
    code = (
        "import sys\nfrom fedbn_flwr.lab.deployment import"
        " certs\ncerts.main()\nprint({name.partition('.')[0] for name in sys.modules} &"
        " {'torch', 'numpy', 'flwr', 'yaml', 'typer'})"
    )
    command = [
        sys.executable,
        "-c",
        code,
        str(folder),
        "--nodes",
        "1",
        "--env",
        str(env),
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    first = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment
    )
    assert first.returncode == 0, first.stderr
    assert first.stdout.splitlines()[-1] == "set()", (
        "what it has imported of heavy packages"
    )
    user = os.getuid() or 1000
    added = (
        "NODE_1_DATA=/srv/a\nexport"
        f" FEDBN_GID=5\nFEDBN_UID={user}\nCOMPOSE_PROFILES=cpu\n"
    )
    assert env.read_text() == added
    for role in folder.iterdir():
        owner = os.getuid() if role.name == "ca" else user
        assert {path.stat().st_uid for path in (role, *role.iterdir())} == {owner}, role
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    env.write_text(env.read_text().replace("5", "6"))
    again = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment
    )
    assert again.returncode == 1
    assert "is in use: keys are never overwritten" in again.stderr
    assert {
        path: path.read_bytes() for path in folder.rglob("*") if path.is_file()
    } == before
    assert env.read_text() == added.replace("5", "6")


@pytest.mark.parametrize(("nodes", "days"), [(0, 1), (1, 0)])
def test_numbers_out_of_range(tmp_path: Path, nodes: int, days: int) -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        make_certificates(tmp_path / "certs", nodes, days=days)
    assert not (tmp_path / "certs").exists()
