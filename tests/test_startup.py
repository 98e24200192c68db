"""What a fresh process imports: a package that takes a second to import is imported where it is used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HEAVY = (
    *("PIL", "datasets", "fastapi", "flwr_datasets", "matplotlib", "onnx", "pandas", "ray", "scipy", "sklearn"),
    *(
        "sqlalchemy",
        "sympy",
        "mlflow",
        "plotly",
        "tensorboard",
        "torch._dynamo",
        "torchvision",
        "wandb",
    ),
)
_STEPS = """
import contextlib, io, json, sys
from pathlib import Path
found = {}
def look(step):
    found[step] = [name for name in %r if name in sys.modules]
import fedbn_flwr
look("import fedbn_flwr")
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
adam = LocalTraining(learning_rate=LearningRate(0.1), optimizer="adamw", gradient_clip_norm=0.1)
class Two:
    __len__ = lambda self: 2
    batch = lambda self, positions, generator=None: (torch.ones(2, 2), torch.zeros(2, dtype=torch.int64))
def end(line):
    look("round 1 of a run")
    train(torch.nn.Linear(2, 2), Two(), adam, learning_rate=0.1, stream=lambda purpose: torch.Generator())
    look("a round of AdamW")
    print(json.dumps(found))
    sys.exit()
run(config, Path("out"), on_round=end)
"""


def test_heavy_packages_are_imported_where_they_are_used(tmp_path: Path) -> None:
    """Up to the end of round 1; the curves after the last round need matplotlib."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    code = _STEPS % (HEAVY,)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {
        "import fedbn_flwr": [],
        "the Flower app": [],
        "fedbn-flwr run --help": [],
        "round 1 of a run": [],
        "a round of AdamW": [],
    }


def test_commands_that_start_at_once_end_as_others_do(tmp_path: Path, at_once: dict[str, str]) -> None:
    """Their output, exit code, folder and environment; see ``preloaded``."""
    code = "import os, sys; print(input(), sys.argv, os.getcwd(), os.environ['ONE'], __name__); sys.exit('the end')"
    environment = {**at_once, "ONE": "1"}
    given = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "check": False}
    done = subprocess.run(["python", "-c", code, "word"], input="line\n", **given)
    assert (done.returncode, done.stderr) == (1, "the end\n")
    assert done.stdout == f"line ['-c', 'word'] {tmp_path} 1 __main__\n"
    assert subprocess.run(["python", "-"], input="import os; os._exit(7)", **given).returncode == 7
    failed = subprocess.run(["python", "-m", "fedbn_flwr.nothing"], **given)
    assert (failed.returncode, "No module named fedbn_flwr.nothing" in failed.stderr) == (1, True)
    bad = subprocess.run(["fedbn-flwr", "run", "--set", "sed=1"], **given)
    assert (bad.returncode, bad.stderr) == (2, "unknown key 'sed'. Did you mean 'seed'?\n")
