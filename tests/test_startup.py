"""A fresh process imports slow packages only when they are needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.checkout import ROOT

HEAVY = (
    "PIL",
    "datasets",
    "fastapi",
    "flwr_datasets",
    "matplotlib",
    "onnx",
    "pandas",
    "ray",
    "scipy",
    "sklearn",
    "sqlalchemy",
    "sympy",
    "tensorboard",
    "torch._dynamo",
    "torchvision",
)
# The laboratory packages that a client of the Flower app needs, and the modules in them
# that only other clients need.
_OF_CLIENTS = {
    "config",
    "data",
    "models",
    "objects_of_config",
    "own_code",
    "partitioned",
    "runs",
}
_OF_OTHERS = (
    "yaml",
    "doctor",
    "lab.config.yaml_text",
    "lab.models.initial",
    "lab.partitioned.counts",
    "lab.data.forms.arrays",
    "lab.data.forms.folder",
    "lab.data.forms.door",
    "lab.data.forms.function",
    "lab.runs.run",
    "lab.runs.serve",
    "lab.runs.check_start",
    "transport.channel_frame",
    "transport.channel_server",
    "transport.grpc_channel",
    "privacy.differential",
)
_STEPS = """
import contextlib, io, json, sys
from pathlib import Path
found = {}
def look(step):
    found[step] = [name for name in %r if name in sys.modules]
def ours():
    names = [name.partition(".")[2] for name in sys.modules if name.startswith("fedbn_flwr.")]
    return names + [name for name in sys.modules if name == "yaml"]
import fedbn_flwr
look("import fedbn_flwr")
import fedbn_flwr.client.torch_client
look("a client")
apart = ("fedbn_flwr.server", "fedbn_flwr.strategies")
found["the server in a client"] = [name for name in sys.modules if name.startswith(apart)]
from apps.main.client_app import app
from flwr.app import Context, RecordDict
from fedbn_flwr.lab.runs.node import client_fn
config = {"dataset": "digits", "strategy": "fedbn", "local-steps": 1}
context = Context(1, 1, {"partition-id": 0, "num-partitions": 5}, RecordDict(), config)
assert client_fn(context).get_properties({})["num-examples"] > 0
look("a client of the Flower app")
of_client = ours()
import fedbn_flwr.app
look("the Flower app")
from fedbn_flwr.lab.cli import app
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    app(["run", "--help"])
look("fedbn-flwr run --help")
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.runs.run import run
small = {"dataset": "digits", "strategy": "fedavg", "partition": "iid", "num-clients": 2, "local-steps": 1}
config = Config.make({**small, "num-server-rounds": 1, "checkpoint-every": 1})
import torch
from fedbn_flwr.training import LearningRate, LocalTraining, train
adam = LocalTraining(learning_rate=LearningRate(0.1), optimizer="adamw")
class Two:
    __len__ = lambda self: 2
    batch = lambda self, positions, generator=None: (torch.ones(2, 2), torch.zeros(2, dtype=torch.int64))
def end(line):
    look("round 1 of a run")
    train(torch.nn.Linear(2, 2), Two(), adam, learning_rate=0.1, stream=lambda purpose: torch.Generator())
    look("a round of AdamW")
    print(json.dumps([found, of_client]))
    sys.exit()
run(config, Path("out"), on_round=end)
"""


def said_by(folder: Path, code: str, *words: str):
    """Return the value in the last line of a program in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_packages_and_rooms_are_imported_where_they_are_used(tmp_path) -> None:
    """The limit is the end of round 1, because the curves need matplotlib.

    A client loads the methods when a message names a client hook. A client of the
    Flower app loads no command, plot, report, study, server or reader of tables: each
    of its messages may be a process of its own.
    """
    found, ours = said_by(tmp_path, _STEPS % (HEAVY,))
    rooms = {name.split(".")[1] for name in ours if name.startswith("lab.")}
    assert rooms <= _OF_CLIENTS
    assert {*ours}.isdisjoint(_OF_OTHERS)
    assert len(found) == 8
    assert found == {step: [] for step in found}


# A command that answers without torch may load only these few packages. Flower would
# take longer than they do.
LIGHT = {
    "fedbn_flwr",
    "click",
    "typer",
    "rich",
    "shellingham",
    "typing_extensions",
    "yaml",
    "_yaml",
    "cython_runtime",  # from yaml
    "pygments",  # from rich
    "markdown_it",
    "mdurl",
    "attr",
    "attrs",
    "pydantic",
    "pydantic_core",
    "annotated_types",
    "typing_inspection",
}
_COMMAND = """
import json, sys
before = {name.partition(".")[0] for name in sys.modules}
from fedbn_flwr.lab.cli import app
codes = []
for command in sys.argv[1:]:
    try:
        app(command.split())
    except SystemExit as end:
        codes.append(end.code)
print(json.dumps([codes, sorted({name.partition(".")[0] for name in sys.modules} - before)]))
"""


COMMANDS = {
    "--version": 0,
    "--help": 0,
    "run --help": 0,
    "sweep absent.yaml --out out": 2,
    "evaluate absent --dataset usps": 2,
    "report absent": 2,
}


def test_a_command_that_only_answers_loads_no_torch(tmp_path) -> None:
    found, loaded = said_by(tmp_path, _COMMAND, *COMMANDS)
    assert found == [*COMMANDS.values()]
    others = {
        name for name in loaded if not name.startswith(("_cython", "_sysconfigdata"))
    } - sys.stdlib_module_names
    assert others <= LIGHT
