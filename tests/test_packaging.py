"""Wheel, sdist and Flower app bundle each contain the package once.

It is importable from a folder with nothing else.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.support.checkout import PYPROJECT, ROOT, copied
from tests.support.fast import fast

# one build of the archives, in the process with all imports
pytestmark = pytest.mark.xdist_group("at_once")

BIN = Path(sys.executable).parent
KINDS = ("wheel", "sdist", "bundle")

# Torch comes from its installation; the checkout itself must not help.
IMPORT = """
import importlib.util, json, sys
folder, checkout = sys.argv[1:]
sys.dont_write_bytecode = True
for name in [name for name in sys.modules if name.split(".")[0] in ("fedbn_flwr", "apps", "tests")]:
    del sys.modules[name]
sys.path[:] = [folder] + [path for path in sys.path if path not in ("", checkout)]
import fedbn_flwr.app, fedbn_flwr.lab.cli
assert fedbn_flwr.app.client_app and fedbn_flwr.app.server_app
files = sorted(module.__file__ for name, module in sys.modules.items() if name.split(".")[0] in ("fedbn_flwr", "apps"))
print(json.dumps({"files": files, "strategies": importlib.util.find_spec("strategies") is not None}))
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> dict[str, Path]:
    """Return the root folder of each archive's content, built from the checkout."""
    folder = tmp_path_factory.mktemp("archives")
    root = copied(folder)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, root]
    bundle = [BIN / "flwr", "build", "--app", root]
    env = {**os.environ, "FLWR_HOME": str(folder / "home")}
    said = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    works = [
        subprocess.Popen(command, cwd=folder, env=env, **said)
        for command in (build, bundle)
    ]
    for work in works:
        output, _ = work.communicate(timeout=120)
        assert work.returncode == 0, output
    (wheel,), (sdist,), (fab,) = (
        list(folder.glob(f"*.{kind}")) for kind in ("whl", "tar.gz", "fab")
    )
    for kind, archive in (("wheel", wheel), ("bundle", fab)):
        with zipfile.ZipFile(archive) as file:
            file.extractall(folder / kind)
    with tarfile.open(sdist) as file:
        file.extractall(folder / "sdist-outer", filter="data")
    (inner,) = (folder / "sdist-outer").iterdir()
    return {"wheel": folder / "wheel", "sdist": inner, "bundle": folder / "bundle"}


def sources(root: Path) -> dict[Path, bytes]:
    """Return the content of the package's modules by path from its parent."""
    found = (root / "fedbn_flwr").rglob("*.py")
    return {path.relative_to(root): path.read_bytes() for path in found}


@pytest.mark.parametrize("kind", KINDS)
def test_each_archive_has_the_package_once(kind: str, unpacked) -> None:
    root = unpacked[kind]
    assert sources(root) == sources(ROOT)
    fedavg = root / "fedbn_flwr/strategies/fedavg.py"
    assert [*root.rglob("fedavg.py")] == [fedavg]
    links = [path for path in root.rglob("*") if path.is_symlink()]
    assert links == ([root / "strategies"] if kind == "sdist" else [])


def test_the_other_files_of_each_archive(unpacked) -> None:
    (info,) = unpacked["wheel"].glob("*.dist-info")
    content = {"fedbn_flwr", info.name}  # no apps, no tests
    assert {*os.listdir(unpacked["wheel"])} == content
    for name in ("py.typed", "lab/report/report.css", "strategies/constructors.pyi"):
        # A bundle has no report, because Flower accepts no HTML files.
        for kind in ("wheel", "sdist"):
            assert (unpacked[kind] / "fedbn_flwr" / name).is_file()
    assert (info / "licenses/LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    entry_points = (info / "entry_points.txt").read_text()
    assert "fedbn-flwr = fedbn_flwr.__main__:main" in entry_points
    # If Flower installs dependencies, the default app gets the laboratory's.
    installed = tomllib.loads((unpacked["bundle"] / "pyproject.toml").read_text())
    assert installed["dependency-groups"] == {"app": ["fedbn-flwr[lab]"]}
    assert installed["tool"]["uv"] == {"default-groups": ["app"]}
    needed = {"fedbn_flwr", "apps", "pyproject.toml", "README.md", "LICENSE", ".info"}
    assert {*os.listdir(unpacked["bundle"])} == needed
    tests, there = (
        {path.relative_to(root) for path in (root / "tests").rglob("*.py")}
        for root in (ROOT, unpacked["sdist"])
    )
    assert there == tests


# Nodes install the other two.
@pytest.mark.parametrize("kind", fast(KINDS, "wheel", "bundle"))
def test_each_archive_imports_from_an_empty_folder(
    kind: str, unpacked, tmp_path, at_once
) -> None:
    env = {**at_once, "FLWR_HOME": str(tmp_path / "home")}
    code = IMPORT
    if kind == "bundle":
        # Load the components as Flower does, by the names in the bundle's
        # pyproject.toml.
        bundle = tomllib.loads((unpacked[kind] / "pyproject.toml").read_text())
        components = bundle["tool"]["flwr"]["app"]["components"]
        modules = ", ".join(name.split(":")[0] for name in components.values())
        code = IMPORT.replace(
            "import fedbn_flwr.app,", f"import {modules}, fedbn_flwr.app,"
        )
    done = subprocess.run(
        ["python", "-c", code, str(unpacked[kind]), str(ROOT)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["files"]
    for file in found["files"]:
        assert Path(file).is_relative_to(unpacked[kind])
    # A module of that name would shadow, or be shadowed by, the user's own. The sdist
    # has it as the checkout does.
    assert found["strategies"] is (kind == "sdist")


def test_one_version() -> None:
    project = PYPROJECT["project"]
    assert f"version: {project['version']}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## [{project['version']}]" in (ROOT / "CHANGELOG.md").read_text()
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    for dependency in itertools.chain(*lists):
        assert "<" in dependency, "an upper bound"


def test_each_test_has_a_limit(pytestconfig) -> None:
    """Without the plugin, pytest ignores its settings."""
    assert pytestconfig.pluginmanager.hasplugin("timeout")
    assert float(pytestconfig.getini("timeout")) > 0
