"""Simulation on the CPU beside the bare torch loop and other packages, as ratios
measured in turns.

    python benchmarks/simulation.py                                       # random images, packages that are installed
    python benchmarks/simulation.py --data-dir DIR                        # CIFAR-10 and MNIST in torchvision's folders
    python benchmarks/simulation.py --peer-python PYTHON --peers DIR      # all peers
    python benchmarks/simulation.py --only fedbn --turns 1 --rounds 2     # a quick look

Settings: ``SETTINGS`` in ``peers/work.py``, each contender's own in its file in
``peers``. All do the same number of steps on the same images with plain SGD in float32,
each process with one torch thread. A contender runs in fresh processes, in turns with
the others, and times its rounds itself without the first; shown are medians over all
rounds of all turns. CPU seconds count every process of the contender, Ray's own too;
memory is the sum of what its processes need at their highest (shared pages once).
Accuracies are those after the timed rounds of the first turn, on 2000 test images; with
FedBN the mean over the clients, each with its own BN entries.

Peers that are packages: pip install pfl==0.6.0 fluke-fl==0.8.1, best in an environment
of their own whose interpreter is ``--peer-python``. Peers that are none: checkouts of
github.com/TsingZ0/PFLlib and github.com/KarhouTam/FL-bench, folders PFLlib and FL-bench
in the folder ``--peers`` (with their requirements in the same environment). A peer that
is not there is named as missing.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
import yaml
from measure import ROOT, commit, facts, in_turns
from peers.work import MARK, SETTINGS, Job, Setting

from fedbn_flwr.lab.data import load_dataset

BARE = "bare torch loop"
RUNS = 3
"""Runs of a setting whose ratios the page shows as a range."""
_HEAD = """# What benchmarks/simulation.py measured, by run: medians over all rounds of all turns. The chart and the
# tables of performance.md are made of this file (`python docs/pictures.py`, `make generate`).
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@dataclass(frozen=True)
class Contender:
    """One row of a table.

    Attributes:
        name: the row's name.
        module: the module in ``peers``.
        workers: see ``Job``.
        variant: see ``Job``.
        package: distribution and version that it needs in the peers' environment; "":
            this package's own environment.
        imports: a module that tells whether the package is there.
        checkout: its folder in ``--peers``, and the repository to have there.
        launcher: arguments of the interpreter before the module.
    """

    name: str
    module: str
    workers: int = 1
    variant: str = ""
    package: str = ""
    imports: str = ""
    checkout: tuple[str, str] = ("", "")
    launcher: tuple[str, ...] = field(default=(), kw_only=True)


def ours(workers: int, variant: str = "") -> Contender:
    """Return this package in process with some workers, or in a variant."""
    if variant == "ray":
        return Contender(f"fedbn-flwr, Ray, {workers} actors", "ours", workers, variant)
    where = f"{workers} worker{'s' * (workers > 1)}" if workers else "in the process"
    return Contender(
        f"fedbn-flwr, {where}{variant and ', ' + variant}", "ours", workers, variant
    )


FLOWER = Contender("Flower's own strategy and client, Ray, 2 actors", "flower", 2)
PFL = ("pfl==0.6.0", "pfl")
OURS = (ours(0), ours(1), ours(2), ours(2, "ray"))

CONTENDERS: dict[str, tuple[Contender, ...]] = {
    "cifar10": (
        Contender(BARE, "bare"),
        Contender(f"{BARE}, 2 processes", "bare", 2),
        Contender("pfl-research", "pfl_research", 1, "", *PFL),
        Contender(
            "pfl-research, 2 processes", "pfl_research", 2, "", *PFL, launcher=TORCHRUN
        ),
        FLOWER,
        *OURS,
        ours(0, "bf16"),
    ),
    "fedbn": (
        Contender(BARE, "bare"),
        Contender(f"{BARE}, 2 processes", "bare", 2),
        Contender("fluke", "fluke_fl", 1, "", "fluke-fl==0.8.1", "fluke"),
        Contender(
            "PFLlib",
            "pfllib",
            1,
            "",
            "",
            "h5py",
            ("PFLlib", "github.com/TsingZ0/PFLlib"),
        ),
        Contender(
            "FL-bench",
            "fl_bench",
            1,
            "",
            "",
            "hydra",
            ("FL-bench", "github.com/KarhouTam/FL-bench"),
        ),
        FLOWER,
        *OURS,
    ),
    "mlp-128": (Contender(BARE, "bare"), ours(0), ours(2)),
    **{
        name: (
            Contender(BARE, "bare"),
            Contender(f"{BARE}, channels_last", "bare", 1, "channels-last"),
            ours(0),
            ours(2),
            ours(0, "bf16"),
            ours(0, "compile"),
        )
        for name in ("resnet20-20", "resnet20-128")
    },
    **{
        name: (Contender(BARE, "bare"), ours(0))
        for name in (
            *("evaluation-mlp", "evaluation-lenet"),
            *("tensors", "hugging-face", "folder-0", "folder-2"),
        )
    },
    **{
        name: (
            Contender(BARE, "bare"),
            ours(0),
            ours(0, "fedtan"),
            ours(2),
            ours(2, "fedtan"),
        )
        for name in ("fedtan", "fedtan-5")
    },
}

IN_PROCESS, TWO_WORKERS, IN_RAY, FEDTAN = (
    contender.name
    for contender in (ours(0), ours(2), ours(2, "ray"), ours(0, "fedtan"))
)
TARGETS: tuple[tuple[str, str, str, str], ...] = (
    ("cifar10", IN_PROCESS, BARE, "<= 1.05"),
    ("cifar10", IN_PROCESS, "pfl-research", ""),
    ("cifar10", TWO_WORKERS, f"{BARE}, 2 processes", ""),
    ("cifar10", TWO_WORKERS, "pfl-research, 2 processes", "<= 1.05"),
    ("cifar10", TWO_WORKERS, FLOWER.name, "<= 0.48"),
    ("cifar10", IN_RAY, FLOWER.name, "<= 0.85"),
    ("fedbn", IN_PROCESS, BARE, "<= 1.12"),
    ("fedbn", TWO_WORKERS, f"{BARE}, 2 processes", "<= 1.20"),
    ("fedbn", IN_PROCESS, "fluke", ""),
    ("fedbn", IN_PROCESS, "PFLlib", ""),
    ("fedbn", IN_PROCESS, "FL-bench", ""),
    ("fedbn", IN_RAY, FLOWER.name, "<= 1.00"),
    ("mlp-128", IN_PROCESS, BARE, "<= 1.18"),
    ("mlp-128", TWO_WORKERS, IN_PROCESS, "<= 0.65"),
    ("resnet20-20", IN_PROCESS, BARE, "<= 0.85"),
    ("resnet20-20", IN_PROCESS, f"{BARE}, channels_last", "<= 0.99"),
    ("resnet20-128", IN_PROCESS, BARE, "<= 0.85"),
    ("resnet20-128", IN_PROCESS, f"{BARE}, channels_last", "<= 0.99"),
    ("evaluation-mlp", IN_PROCESS, BARE, "<= 1.10"),
    ("evaluation-lenet", IN_PROCESS, BARE, "<= 1.10"),
    ("tensors", IN_PROCESS, BARE, "<= 1.00"),
    ("hugging-face", IN_PROCESS, BARE, ""),
    ("folder-0", IN_PROCESS, BARE, ""),
    ("folder-2", IN_PROCESS, BARE, ""),
    ("fedtan", FEDTAN, IN_PROCESS, "<= 1.20"),
    ("fedtan", f"{TWO_WORKERS}, fedtan", TWO_WORKERS, "<= 1.20"),
    ("fedtan", FEDTAN, BARE, ""),
    ("fedtan-5", FEDTAN, IN_PROCESS, "<= 1.08"),
    ("fedtan-5", f"{TWO_WORKERS}, fedtan", TWO_WORKERS, "<= 1.08"),
    ("fedtan-5", FEDTAN, BARE, ""),
)
"""Setting, this row, divided by that row, and the target."""


def prepare(folder: Path, data_dir: str, settings: Sequence[Setting]) -> None:
    """Write the images of the settings: as bytes for this package, as normalised
    float32 for all others.
    """
    for name, size, channels in (("cifar10", 32, 3), ("mnist", 28, 1)):
        place = folder / name
        needed = max(
            (work.clients * work.examples for work in settings if work.dataset == name),
            default=0,
        )
        if not needed:
            continue
        place.mkdir()
        if data_dir:
            dataset = load_dataset(name, data_dir)
            parts = {"train": dataset.train, "test": dataset.test}
            whole = {
                part: samples.take(torch.arange(len(samples)))
                for part, samples in parts.items()
            }
            pixels = {part: inputs for part, (inputs, _) in whole.items()}
            targets = {part: classes for part, (_, classes) in whole.items()}
            mean, std = dataset.mean, dataset.std
        else:
            generator = torch.Generator().manual_seed(0)
            counts = {"train": needed, "test": 10_000}
            shape = (channels, size, size)
            pixels = {
                part: torch.randint(
                    256, (n, *shape), dtype=torch.uint8, generator=generator
                )
                for part, n in counts.items()
            }
            targets = {
                part: torch.randint(10, (n,), generator=generator)
                for part, n in counts.items()
            }
            mean, std = (0.5,) * channels, (0.29,) * channels
        (place / "norm.json").write_text(json.dumps({"mean": mean, "std": std}))
        for part, images in pixels.items():
            order = torch.randperm(
                len(images), generator=torch.Generator().manual_seed(0)
            )
            order = order[:needed] if part == "train" else order
            chosen = images[order]
            scaled = chosen.float().div_(255).sub_(torch.tensor(mean).view(-1, 1, 1))
            np.save(place / f"{part}-pixels.npy", chosen.numpy())
            np.save(
                place / f"{part}-inputs.npy",
                scaled.div_(torch.tensor(std).view(-1, 1, 1)).numpy(),
            )
            np.save(place / f"{part}-targets.npy", targets[part][order].numpy())


class Missing(Exception):
    """A peer that is not there, with what to do."""


@dataclass(frozen=True)
class Course:
    """Where contenders run, and how long.

    Attributes:
        folder: the data, and room for results.
        peer_python: the peers' interpreter.
        peers: the folder of the checkouts, or "".
        rounds: timed rounds in a turn, or a multiple of them; see ``Setting.times``.
    """

    folder: Path
    peer_python: str
    peers: str
    rounds: int

    def check(self, contender: Contender) -> None:
        """Raise Missing unless the contender can run."""
        name, repository = contender.checkout
        if name and not (self.peers and (Path(self.peers) / name).is_dir()):
            raise Missing(
                f"needs a checkout of {repository} as the folder {name} in the folder"
                " given by --peers"
            )
        if contender.imports:
            command = [self.peer_python, "-c", f"import {contender.imports}"]
            if subprocess.run(command, capture_output=True).returncode:
                remedy = (
                    f"pip install {contender.package}"
                    if contender.package
                    else f"{repository}'s requirements"
                )
                raise Missing(
                    f"{contender.imports} is not installed for"
                    f" {Path(self.peer_python).name}: {remedy}"
                )

    def run(self, contender: Contender, setting: str) -> dict[str, Any]:
        """Run a contender in fresh processes and return its result.

        Raises:
            RuntimeError: it failed; with the last lines of its log.
        """
        out = self.folder / "result.json"
        out.unlink(missing_ok=True)
        checkout = (
            str(Path(self.peers) / contender.checkout[0])
            if contender.checkout[0]
            else ""
        )
        rounds = SETTINGS[setting].times * self.rounds
        job = Job(
            setting,
            str(self.folder),
            str(out),
            rounds,
            contender.workers,
            contender.variant,
            checkout,
        )
        python = self.peer_python if contender.imports else sys.executable
        path = [str(Path(__file__).parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(part for part in path if part),
            MARK: uuid.uuid4().hex,
            **{
                "OMP_NUM_THREADS": "1",
                "MKL_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
            },
            **{
                "FLWR_TELEMETRY_ENABLED": "0",
                "FLWR_DISABLE_UPDATE_CHECK": "1",
                "RAY_USAGE_STATS_ENABLED": "0",
            },
        }
        command = [
            python,
            *contender.launcher,
            "-m",
            f"peers.{contender.module}",
            json.dumps(asdict(job)),
        ]
        done = subprocess.run(
            command, env=environment, cwd=self.folder, capture_output=True, text=True
        )
        if not out.exists():
            raise RuntimeError(
                f"{contender.name} failed in"
                f" {setting}:\n{(done.stdout + done.stderr)[-4000:]}"
            )
        found: dict[str, Any] = json.loads(out.read_text())
        found["version"] = (
            found["version"] or f"{contender.checkout[0]} {commit(Path(checkout))}"
        )
        return found


@dataclass
class Figures:
    """What was measured in one setting, by contender."""

    setting: str
    results: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def seconds(self, name: str) -> float | None:
        """Return the median over all rounds; None if the contender was not there."""
        return self.median(name, "seconds")

    def median(self, name: str, key: str) -> float | None:
        """Return the median of a figure over all rounds or runs; None if there is none."""
        found: list[float] = []
        for result in self.results.get(name, []):
            found += result[key] if isinstance(result[key], list) else [result[key]]
        return statistics.median(found) if found and None not in found else None

    def data(self, note: str, real_data: bool) -> dict[str, Any]:
        """Return what the page needs of the setting, and how it was measured; see
        ``docs/performance.yaml``.
        """
        rows = {}
        for name, results in self.results.items():
            figures = {
                "seconds": "seconds",
                "cpu-seconds": "cpu_seconds",
                "memory": "memory",
            }
            rows[name] = {
                "version": results[0]["version"],
                **{key: _rounded(self.median(name, of)) for key, of in figures.items()},
                "accuracy": _rounded(results[0]["accuracy"]) if real_data else None,
            }
        ratios = [
            [name, against, target]
            for setting, name, against, target in TARGETS
            if setting == self.setting
        ]
        run = {"rows": rows, "missing": self.missing, "note": note}
        return {"title": SETTINGS[self.setting].title, "ratios": ratios, "runs": [run]}


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def measure(setting: str, course: Course, turns: int) -> Figures:
    """Measure all contenders of a setting in turns."""
    figures = Figures(setting)
    present = []
    for contender in CONTENDERS[setting]:
        try:
            course.check(contender)
            present.append(contender)
        except Missing as reason:
            figures.missing[contender.name] = str(reason)
            print(f"missing: {contender.name}: {reason}", file=sys.stderr, flush=True)

    def way(contender: Contender) -> Sequence[float]:
        result = course.run(contender, setting)
        figures.results.setdefault(contender.name, []).append(result)
        seconds: list[float] = result["seconds"]
        return seconds

    ways = {f"{setting}: {one.name}": functools.partial(way, one) for one in present}
    in_turns(ways, turns)
    order = [contender.name for contender in present]
    figures.results = {name: figures.results[name] for name in order}
    return figures


def _is_named(name: str, parts: Sequence[str]) -> bool:
    return any(part in name for part in parts)


def main(
    turns: Annotated[
        int, typer.Option(min=1, help="turns; each runs every contender once")
    ] = 5,
    rounds: Annotated[
        int,
        typer.Option(min=1, help="rounds timed in a turn, more if they are short"),
    ] = 4,
    only: Annotated[
        list[str] | None,
        typer.Option(help=f"settings: {', '.join(SETTINGS)}; default: all"),
    ] = None,
    contender: Annotated[
        list[str] | None,
        typer.Option(help="only rows whose name contains this; default: all"),
    ] = None,
    data_dir: Annotated[
        str,
        typer.Option(
            help="folder with cifar-10-batches-py and MNIST; else random images"
        ),
    ] = "",
    peer_python: Annotated[
        str, typer.Option(help="interpreter that has the peers' packages")
    ] = sys.executable,
    peers: Annotated[
        str,
        typer.Option(help="folder with the checkouts of peers that are no packages"),
    ] = "",
    out: Annotated[Path, typer.Option(help="JSON file for all figures")] = Path(
        "runs/benchmark-simulation.json"
    ),
    write: Annotated[
        Path | None,
        typer.Option(
            help=(
                "docs/performance.yaml: add this run to the measured settings; each"
                f" keeps its last {RUNS} runs"
            )
        ),
    ] = None,
) -> None:
    """Measure this package beside the bare torch loop and other packages."""
    names = only or list(SETTINGS)
    if unknown := [name for name in names if name not in SETTINGS]:
        raise typer.BadParameter(
            f"unknown setting {unknown[0]!r}; known: {', '.join(SETTINGS)}"
        )
    interpreter = shutil.which(peer_python)
    if interpreter is None:
        raise typer.BadParameter(
            f"--peer-python {peer_python}: this program does not exist. Name the"
            " interpreter of the peers, such as ../fedbn-flwr-peers/bin/python"
        )
    found = {}
    with tempfile.TemporaryDirectory(prefix="simulation-benchmark-") as folder:
        prepare(Path(folder), data_dir, [SETTINGS[name] for name in names])
        course = Course(
            Path(folder),
            # Make the path absolute, because contenders run in another folder. Do not
            # resolve links, because Python finds its environment by the link to the
            # interpreter.
            os.path.abspath(interpreter),
            str(Path(peers).resolve()) if peers else "",
            rounds,
        )
        for name in names:
            if contender:
                CONTENDERS[name] = tuple(
                    one for one in CONTENDERS[name] if _is_named(one.name, contender)
                )
            found[name] = measure(name, course, turns)
    images = (
        "CIFAR-10 and MNIST" if data_dir else "random images: accuracies say nothing"
    )
    settings = {}
    for name, one in found.items():
        note = (
            f"{facts()} {turns} turn{'s' * (turns > 1)} of"
            f" {SETTINGS[name].times * rounds} rounds; {images}."
        )
        settings[name] = one.data(note, bool(data_dir))
    if write is not None and write.exists():
        known = yaml.safe_load(write.read_text(encoding="utf-8"))["settings"]
        for name, setting in settings.items():
            earlier = known.get(name, {"runs": []})["runs"]
            setting["runs"] = [*earlier, *setting["runs"]][-RUNS:]
        settings = known | settings
    text = _HEAD + yaml.safe_dump(
        {"settings": settings}, sort_keys=False, allow_unicode=True, width=1000
    )
    print(text)
    figures = {
        name: {"results": one.results, "missing": one.missing}
        for name, one in found.items()
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    partial.write_text(
        json.dumps({"facts": facts(), "figures": figures}, indent=2) + "\n"
    )
    os.replace(partial, out)
    if write is not None:
        write.write_text(text)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
