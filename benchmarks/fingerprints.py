"""The final bits of a fixed set of runs, to compare two versions of the code.

::

    python benchmarks/fingerprints.py --record benchmarks/fingerprints.json   # of the code that is installed
    python benchmarks/fingerprints.py --compare benchmarks/fingerprints.json

The runs are the demo's methods, every strategy on an even and an uneven split of
digits, and one run on MNIST (``--mnist FOLDER``; left out without it). Recorded are the
SHA-256 of the final state (what clients keep included) and the traffic of each run.
Another CPU or another version of torch gives other bits: record and compare on one
machine. ``--package FOLDER`` runs the code of another checkout with this environment.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BASE = {
    "dataset": "digits",
    "model": "mlp",
    "num-clients": 5,
    "num-server-rounds": 8,
    "eval-every": 8,
}
BASE |= {"local-steps": 5, "batch-size": 16, "learning-rate": 0.1, "bn-momentum": 0.5}
STRATEGIES = (
    "fedavg",
    "fedprox",
    "scaffold",
    "fedavgm",
    "fedadam",
    "fedyogi",
    "fedadagrad",
    "fedbn",
    "silobn",
    "mtfl",
    "staticbn",
    "fixbn",
    "fedtan",
    "fedtan2",
    "feddna",
    "fedbs",
    "fedwon",
    "standalone",
)
OWN: dict[str, dict[str, Any]] = {
    "fedwon": {"norm": "wsconv", "model": "lenet", "agc": 0.1},
    "fedtan2": {"fedtan-rounds": 4},
    "fedyogi": {"server-learning-rate": 0.1},
    "fedavgm": {"server-momentum": 0.0},
}
MATRIX = {
    "name": "matrix",
    "base": BASE,
    "methods": {name: {"strategy": name, **OWN.get(name, {})} for name in STRATEGIES},
    "splits": {
        "iid": {"partition": "iid"},
        "classes": {"partition": "classes", "classes-per-client": 2},
    },
}


def mnist(folder: Path) -> dict[str, Any]:
    """Return the study of the MNIST run."""
    base = {
        "dataset": "mnist",
        "data-dir": str(folder),
        "num-clients": 5,
        "num-server-rounds": 10,
        "local-steps": 10,
    }
    return {"name": "mnist", "base": base, "methods": {"fixbn": {"strategy": "fixbn"}}}


def fingerprints(
    studies: dict[str, dict[str, Any] | Path], package: Path
) -> dict[str, Any]:
    """Run the studies with the code in ``package``; return SHA-256 and traffic by
    STUDY/METHOD/SPLIT.
    """
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, study in studies.items():
            path = Path(folder) / f"{name}.yaml"
            path.write_text(
                json.dumps(study) if isinstance(study, dict) else study.read_text()
            )
            out = Path(folder) / name
            command = [
                str(Path(sys.executable).parent / "fedbn-flwr"),
                "sweep",
                str(path),
                "--out",
                str(out),
            ]
            subprocess.run(
                command, check=True, env={**os.environ, "PYTHONPATH": str(package)}
            )
            for summary in sorted(out.rglob("summary.json")):
                said = json.loads(summary.read_text())
                key = "/".join([name, *summary.parent.relative_to(out).parts[:-1]])
                found[key] = {"sha256": said["sha256"], "ledger": said["ledger"]}
    return found


def main() -> int:
    """Record, or compare; return 1 where a run ended in other bits."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--record", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--mnist", type=Path)
    parser.add_argument("--package", type=Path, default=ROOT)
    arguments = parser.parse_args()
    studies: dict[str, dict[str, Any] | Path] = {
        "matrix": MATRIX,
        "demo": ROOT / "apps/main/recipes/demo.yaml",
    }
    if arguments.mnist:
        studies["mnist"] = mnist(arguments.mnist.resolve())
    found = fingerprints(studies, arguments.package)
    if arguments.record:
        arguments.record.write_text(json.dumps(found, indent=1) + "\n")
    if not arguments.compare:
        return 0
    recorded = json.loads(arguments.compare.read_text())
    wrong = [key for key, value in found.items() if recorded.get(key) != value]
    missing = sorted(recorded.keys() - found.keys())
    print(
        f"{len(found) - len(wrong)} of {len(found)} runs as recorded; other: {wrong};"
        f" not run: {missing}"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
