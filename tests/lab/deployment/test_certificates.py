"""``make certs`` writes files with permissions and purpose, and overwrites none."""

from __future__ import annotations

import os
import shutil
import ssl
import stat
import subprocess
from pathlib import Path

import pytest
from cryptography import x509

from tests.support.checkout import ROOT
from tests.support.folders import contents


def script(
    *words: object, env: Path = Path("/dev/null")
) -> subprocess.CompletedProcess[str]:
    command = [ROOT / "docker/certs.sh", *map(str, words), "--env", env]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def certs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("certificates") / "certs"
    hosts = "fl.example.org,192.0.2.7"
    done = script(folder, "--nodes", 2, "--hosts", hosts, "--days", 30)
    assert done.returncode == 0
    return folder


def test_each_role_has_what_it_needs_and_no_more(certs) -> None:
    server, secret = {"ca.crt", "server.crt", "server.key"}, {"superexec.secret"}
    app, node = {"ca.crt"} | secret, server | secret | {"node.key"}
    expected = {
        "ca": {"ca.crt", "ca.key"},
        "superlink": server | secret,
        "serverapp": app,
        "channel": server,
        "cli": {"ca.crt", "node-1.pub", "node-2.pub"},
        "node-1": node,
        "node-2": node,
        "clientapp-1": app,
        "clientapp-2": app,
    }
    found = {path.name: {*os.listdir(path)} for path in certs.iterdir()}
    assert found == expected


def test_only_the_owner_can_read_secrets(certs) -> None:
    for path in certs.rglob("*"):
        wanted = 0o600 if path.suffix in (".key", ".secret") else 0o644
        wanted = 0o700 if path.is_dir() else wanted
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


read = x509.load_pem_x509_certificate


def extension(certificate: x509.Certificate, kind):
    return certificate.extensions.get_extension_for_class(kind).value


def names_of(certificate: x509.Certificate) -> list[str]:
    """Return the names and the addresses of the hosts."""
    found = extension(certificate, x509.SubjectAlternativeName)
    numbers = found.get_values_for_type(x509.IPAddress)
    return [*found.get_values_for_type(x509.DNSName), *map(str, numbers)]


def lifetime(certificate: x509.Certificate) -> int:
    return (certificate.not_valid_after_utc - certificate.not_valid_before_utc).days


def test_certificates_have_their_names_and_are_signed_by_the_ca(certs) -> None:
    authority = read((certs / "ca/ca.crt").read_bytes())
    assert extension(authority, x509.BasicConstraints).ca
    own = {"superlink": "superlink", "channel": "superexec-serverapp"}
    # A node must not be able to impersonate the server.
    for role, name in {**own, "node-2": "supernode-2"}.items():
        found = read((certs / role / "server.crt").read_bytes())
        found.verify_directly_issued_by(authority)
        hosts, addresses = [], []
        if role in own:
            hosts, addresses = ["fl.example.org"], ["192.0.2.7"]
        local = ["127.0.0.1", "::1"]
        assert names_of(found) == [name, *hosts, "localhost", *addresses, *local]
        assert not extension(found, x509.BasicConstraints).ca
        assert lifetime(found) == 30
        folder = certs / role
        context = ssl.create_default_context()
        context.load_cert_chain(folder / "server.crt", folder / "server.key")


def test_a_superexec_shares_the_secret_of_its_own_server_only(certs) -> None:
    of_app = {
        "superlink": "serverapp",
        "node-1": "clientapp-1",
        "node-2": "clientapp-2",
    }
    found, files = set(), contents(certs)
    for server, app in of_app.items():
        secret = files[f"{server}/superexec.secret"]
        assert files[f"{app}/superexec.secret"] == secret
        assert len(secret) == 32
        found.add(secret)
    assert len(found) == 3


def test_the_command_overwrites_nothing(tmp_path) -> None:
    """The keys belong to the user in .env and never to root.

    Containers run as this user.
    """
    folder, env = tmp_path / "certs", tmp_path / ".env"
    given = "NODE_1_DATA=/srv/a\nexport FEDBN_GID=5"
    env.write_text(given)
    first = script(folder, "--nodes", 1, env=env)
    assert first.returncode == 0, first.stderr
    user = os.getuid() or 1000
    added = f"{given}\nFEDBN_UID={user}\nCOMPOSE_PROFILES=cpu\n"
    assert env.read_text() == added
    for role in folder.iterdir():
        owner = os.getuid() if role.name == "ca" else user
        assert {path.stat().st_uid for path in (role, *role.iterdir())} == {owner}, role
    before, edited = contents(folder), added.replace("5", "6")
    env.write_text(edited)
    again = script(folder, "--nodes", 1, env=env)
    assert "is in use, and keys are never overwritten" in again.stderr
    assert contents(folder) == before
    assert env.read_text() == edited


@pytest.fixture
def own(certs, tmp_path) -> Path:
    """Return a copy of the certificates for changes."""
    return shutil.copytree(certs, tmp_path / "certs")


def test_a_further_node_gets_keys_and_no_other_file_changes(certs, own) -> None:
    script(own, "--add", 3)
    before, after = contents(certs), contents(own)
    assert after.items() > before.items()
    as_node_2 = {name.replace("-2", "-3") for name in before if "-2" in name}
    assert after.keys() - before.keys() == as_node_2
    authority = read(before["ca/ca.crt"])
    read(after["node-3/server.crt"]).verify_directly_issued_by(authority)
    assert after["node-3/ca.crt"] == before["ca/ca.crt"]
    assert after["node-3/superexec.secret"] == after["clientapp-3/superexec.secret"]
    assert len({after[f"node-{n}/node.key"] for n in (1, 2, 3)}) == 3


def test_new_certificates_are_of_the_same_keys_and_names(certs, own) -> None:
    """Old and new certificates verify each other.

    Therefore machines may renew them at different times.
    """
    script(own, "--renew", "--days", 60)
    before, after = contents(certs), contents(own)
    changed = {name for name in before if before[name] != after[name]}
    assert before.keys() == after.keys()
    assert changed == {name for name in before if name.endswith(".crt")}

    for role in ("superlink", "channel", "node-1", "node-2"):
        old, new = (read(files[f"{role}/server.crt"]) for files in (before, after))
        new.verify_directly_issued_by(read(before["ca/ca.crt"]))
        old.verify_directly_issued_by(read(after["ca/ca.crt"]))
        assert new.public_key() == old.public_key()
        assert names_of(new) == names_of(old)
        assert lifetime(new) == 60

    script(own, "--renew", "--hosts", "192.0.2.9")
    for role, address in (("superlink", True), ("channel", True), ("node-1", False)):
        names = names_of(read(contents(own)[f"{role}/server.crt"]))
        assert ("192.0.2.9" in names) == address
        assert "fl.example.org" not in names


def test_what_only_the_authority_signs_is_refused_without_it(own) -> None:
    more = ["--nodes", "3", "--hosts", "", "--add", "3"]
    assert script(own, *more).returncode == 0
    assert script(own, "--renew").returncode == 0
    (own / "ca/ca.key").unlink()
    before = contents(own)
    for change in (["--add", "3"], ["--add", "4"], ["--renew"]):
        assert script(own, *change).returncode == 1
    assert contents(own) == before


@pytest.mark.parametrize(("nodes", "days"), [(0, 1), (1, 0)])
def test_numbers_out_of_range(tmp_path, nodes: int, days: int) -> None:
    done = script(tmp_path / "certs", "--nodes", nodes, "--days", days)
    assert "are 1 or more" in done.stderr
    assert not (tmp_path / "certs").exists()
