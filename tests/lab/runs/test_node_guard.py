"""A server may use a node of the default app only within limits.

The tests cover the names in the run's config and the texts of errors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedbn_flwr.app import client_app
from fedbn_flwr.compat.flower import identify_process
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.messages.protocol import INFO, NUM_EXAMPLES, UNUSABLE
from tests.support.tables import write_images

SECRET = "Mueller_1961"
DEFAULTS = {
    key: value for key, value in Config.make({}).to_mapping().items() if value != ""
}
SHARE = {"partition-id": 0, "num-partitions": 2}
_OPENED = []
_WATCHING = []


def _audit(event: str, values: tuple) -> None:
    if _WATCHING and event in (
        "open",
        "import",
        "os.listdir",
        "os.scandir",
        "os.mkdir",
    ):
        _OPENED.append(str(values[0]))


sys.addaudithook(_audit)  # stays, and does nothing after the test


@pytest.fixture
def opened() -> Iterator[Callable]:
    """Provide ``opened(part)`` to find out whether the test opened a file.

    A path or module counts if its name contains the part.
    """
    _OPENED.clear()
    _WATCHING.append(True)
    yield lambda part: any(part in name for name in _OPENED)
    _WATCHING.clear()


@pytest.fixture
def network(monkeypatch) -> None:
    """Let this process look like a process of a SuperNode."""
    identify_process(1)
    monkeypatch.setattr(TaskIdentity, "_node_id", 7)


@pytest.fixture
def secret(tmp_path, monkeypatch) -> Path:
    """Provide a folder of images with a single class, so that it is refused.

    It is in the working folder of the node, which no permission contains.
    """
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "secret", {SECRET: 2})
    return tmp_path / "secret"


def ask(run: dict, node: dict) -> RecordDict:
    """Return the node's answer to a query."""
    context = Context(1, 7, node, RecordDict(), {**DEFAULTS, **run})
    reply = client_app(Message(RecordDict(), 7, "query"), context)
    assert not reply.has_error()
    return reply.content


def examples(content: RecordDict) -> int:
    (record,) = [one for one in content.values() if NUM_EXAMPLES in one]
    return int(record[NUM_EXAMPLES])


def asks_for(path: Path) -> dict[str, dict]:
    """Return run configs that name a path."""
    return {
        "dataset": {"dataset": f"folder:{path}", "partition": "iid"},
        "data-dir": {"dataset": "mnist", "data-dir": str(path.parent)},
        "state-dir": {"state-dir": str(path.parent / "new")},
        "out": {"state-dir": "out", "out": str(path.parent / "new")},
    }


@pytest.mark.parametrize("name", asks_for(Path()))
@pytest.mark.parametrize(
    "node",
    [SHARE, {"partition-id": 0, "data-path": "/srv/own"}],
    ids=["share", "own data"],
)
def test_a_path_of_the_run_is_not_opened_unless_the_node_allows_it(
    network, secret, opened, name, node
) -> None:
    for allowed in ({}, {"allow-paths": f"/srv,{secret.parent}x"}):
        with pytest.raises(ConfigError, match="allow-paths") as error:
            ask(asks_for(secret)[name], {**node, **allowed})
        assert SECRET not in str(error.value)
        assert not opened(str(secret.parent))
        assert not (secret.parent / "new").exists()


@pytest.mark.parametrize("key", ["model", "loop", "dataset"])
def test_a_module_of_the_run_is_not_imported_unless_the_node_allows_it(
    network, tmp_path, monkeypatch, key
) -> None:
    (tmp_path / "sly_models.py").write_text(
        "import torch\nfrom torch.utils.data import TensorDataset\n"
        "def model(num_classes): return torch.nn.Linear(1, 1)\n"
        "def loop(model, batches, rules, learning_rate): return 0.0\n"
        "def dataset(site, part):\n"
        "    return TensorDataset(torch.ones(4, 3), torch.arange(4) % 2)\n"
        "dataset.input_shape = (3,)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("sly_models", None)
    run = {key: f"sly_models:{key}"}
    if key == "dataset":
        run |= {"eval-on": "personal-own", "task": "classification", "num-classes": 2}
    for node in (SHARE, {**SHARE, "allow-modules": "sly,sly_models.inner"}):
        with pytest.raises(ConfigError, match="allow-modules"):
            ask(run, node)
    assert "sly_models" not in sys.modules
    assert examples(ask(run, {**SHARE, "allow-modules": "other,sly_models"})) > 0


@pytest.mark.parametrize("spelled", ["inside", "linked", "secret/../inside"])
def test_a_node_that_allows_a_folder_opens_what_is_in_it_and_follows_no_link_out_of_it(
    network, secret, spelled
) -> None:
    inside = secret.parent / "inside"
    inside.mkdir()
    write_images(inside / "images", {"cat": 20, "dog": 20})
    (inside / "link").symlink_to(secret)
    (secret.parent / "linked").symlink_to(inside)
    node = {**SHARE, "allow-paths": f"/srv,{secret.parent / spelled}"}
    assert examples(ask(asks_for(inside / "images")["dataset"], node)) > 0
    for outside in (inside / "link", inside / ".." / "secret"):
        with pytest.raises(ConfigError, match="allow-paths"):
            ask(asks_for(outside)["dataset"], node)


@pytest.mark.parametrize("of_run", ["", "out", "new"])
def test_a_nodes_own_folder_wins_over_that_of_the_run(network, secret, of_run) -> None:
    """If it is "out", the run names the folder."""
    run = {"state-dir": of_run, "out": str(secret.parent / "new")}
    assert examples(ask(run, {**SHARE, "state-dir": str(secret.parent / "mine")})) > 0
    with pytest.raises(ConfigError, match="allow-paths"):
        ask(run, {**SHARE, "state-dir": "out"})


def test_on_one_machine_everything_is_open_unless_a_node_says_otherwise(secret) -> None:
    identify_process(1)
    run = asks_for(secret)["state-dir"]
    assert examples(ask(run, SHARE)) > 0
    with pytest.raises(ConfigError, match="allow-paths"):
        ask(run, {**SHARE, "allow-paths": ""})


OWN = {
    "dataset": "folder:",
    "image-size": 28,
    "num-classes": 2,
    "task": "classification",
    "model": "mlp",
}


@pytest.fixture
def own_node(network, secret) -> dict:
    """Return the config of a node whose own data are refused."""
    return {"partition-id": 0, "data-path": str(secret)}


def test_an_error_says_nothing_of_a_files_content(own_node, caplog) -> None:
    told = str(ask(OWN, own_node)[INFO][UNUSABLE])
    assert SECRET not in told
    assert "DataError" in told
    assert "report-data=true" in told
    assert SECRET in caplog.text, "the node's log has it"
    assert SECRET in str(ask(OWN, {**own_node, "report-data": True})[INFO][UNUSABLE])


def test_an_error_of_any_kind_says_nothing_of_a_files_content(
    own_node, secret, monkeypatch
) -> None:
    breaks = mock.Mock(side_effect=KeyError(SECRET))
    monkeypatch.setattr("fedbn_flwr.lab.runs.node.load_data", breaks)
    write_images(secret, {"cat": 2})
    with pytest.raises(Exception, match="KeyError") as error:
        ask(OWN, own_node)
    assert SECRET not in str(error.value)
    with pytest.raises(KeyError, match=SECRET):
        ask(OWN, {**own_node, "report-data": True})


def test_what_is_wrong_with_the_run_itself_is_told(own_node) -> None:
    content = ask({**OWN, "eval-on": "personal-global"}, own_node)
    assert "personal-own" in str(content[INFO][UNUSABLE])
