"""Calibration without labels at a site that did not train: the evidence.

    python benchmarks/new_site.py --data-dir DIR --out runs/new-site
    python benchmarks/new_site.py --out runs/new-site --write docs/results/new-site.md

The protocol was fixed before the first run:

- Data: scikit-learn's digits at five scanners, the four hospitals of UCI heart disease
  (13 columns, two classes), MNIST, USPS and MNIST-M in grey at 16 pixels, and the four
  domains of Office-Caltech-10 at 32 pixels.
- One site after another is left out. The others train with FedAvg+BN, FedBN, SiloBN and
  FixBN, for 20 rounds (heart: 40) with the seeds 0, 1 and 2 (the larger images: 0).
  The site that was left out is the new site, with all its examples. The model without
  digits scanner E is also tested at five scanners that are no site.
- The model is the one with averaged BN statistics. Class moments come from the training
  examples of the sites, under each site's own statistics.
- Class mixes at the new site: "own", all its examples; "training", the most examples
  with the class mix of the training; "80 %", all examples of a random class and a
  quarter as many of all others; "two", all examples of two random classes (not with two
  classes); "one", all examples of a random class. The random mixes have five draws.
- A cell is a data set, a new site, a method, a seed and a class mix; it is the mean
  over the draws. Each draw has the accuracy of every way, the choice of "auto" and its
  judgement.

``calibrate`` was designed with seed 0 and FedBN, at the digits scanners A, E, gamma,
blurred and inverted and at the hospitals. Two rules came after a look at results: ways
must confirm each other (FedBN on MNIST, USPS and MNIST-M), and only a sure way confirms
``matched`` (the inverted scanner under FedAvg+BN and SiloBN). Trust became stricter
(three quarters of the way from guessing, not one class) after somebody had tried images
that are inverted, turned or noise. All other cells are a check. Finished trainings and
cells are kept, so a later call continues. The finished cells of the page:

    gunzip -c benchmarks/new_site.jsonl.gz > runs/new-site/cells.jsonl
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import typer
from torch import Tensor, nn
from torch.nn import functional

from fedbn_flwr import calibrate
from fedbn_flwr.batchnorm.class_moments import (
    ClassMoments,
    class_moments,
    pool_class_moments,
)
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.finished_runs.export import export as export_model
from fedbn_flwr.lab.finished_runs.export import load_exported
from fedbn_flwr.lab.finished_runs.saved_model import Choice
from fedbn_flwr.lab.runs.run import run

METHODS: Mapping[str, Mapping[str, Any]] = {
    "FedAvg+BN": {"strategy": "fedavg"},
    "FedBN": {"strategy": "fedbn", "eval-on": "personal-own,averaged-bn"},
    "SiloBN": {"strategy": "silobn", "eval-on": "personal-own,averaged-bn"},
    "FixBN": {"strategy": "fixbn", "learning-rate": 0.02},
}
MIXES = ("own", "training", "80 %", "two", "one")
WAYS = ("none", "all", "mix", "early", "matched")
DRAWS = 5
Sites = dict[str, tuple[np.ndarray, np.ndarray]]
"""The examples and classes of each site."""


def small(num_classes: int, channels: int) -> nn.Module:
    """Return a CNN with four BN layers, for images of 8 or 16 pixels."""
    return nn.Sequential(
        *(nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        nn.MaxPool2d(2),
        *(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        nn.MaxPool2d(2),
        *(nn.AdaptiveMaxPool2d(2), nn.Flatten()),
        *(nn.Linear(128, 64), nn.BatchNorm1d(64), nn.ReLU()),
        nn.Linear(64, num_classes),
    )


def deeper(num_classes: int, channels: int) -> nn.Module:
    """Return a CNN with six BN layers, for images of 32 pixels."""
    layers: list[nn.Module] = []
    for width in (16, 32, 32, 64, 64):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width)]
        layers += [nn.ReLU()]
        if width > 16 or len(layers) > 3:
            layers += [nn.MaxPool2d(2)]
        channels = width
    layers += [nn.Flatten(), nn.Linear(256, 128), nn.BatchNorm1d(128), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(128, num_classes))


# The data.


def _digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    both = load_digits()
    order = np.random.default_rng(0).permutation(len(both.target))
    return (both.images * 255 / 16).round()[order], both.target[order]


def _blurred(v: np.ndarray) -> np.ndarray:
    p = np.pad(v, ((0, 0), (1, 1), (1, 1)))
    rows = p[:, :-2] + 2 * p[:, 1:-1] + p[:, 2:]
    blurred: np.ndarray = rows[:, :, :-2] + 2 * rows[:, :, 1:-1] + rows[:, :, 2:]
    return blurred / 16


def _noise(v: np.ndarray, deviation: int) -> np.ndarray:
    return v + np.random.default_rng(5).normal(0, deviation, v.shape)


Scanner = Callable[[np.ndarray], np.ndarray]
SCANNERS: Mapping[str, Scanner] = {
    "A": lambda v: v,
    "B": lambda v: 0.6 * v + 60,
    "C": lambda v: 255 * (v / 255) ** 2,
    "D": lambda v: _noise(v, 30),
    "E": lambda v: 0.3 * v + 150,
}
UNSEEN: Mapping[str, Scanner] = {
    "gamma": lambda v: 255 * (v / 255) ** 0.4,
    "blurred": _blurred,
    "noise": lambda v: _noise(v * 0.6 + 80, 60),
    "gradient": lambda v: 0.5 * v + np.linspace(0, 120, 8)[None, None, :],
    "inverted": lambda v: 255 - v,
}


def digits(folder: Path) -> tuple[Sites, Sites]:
    """Return the digits at five scanners, and site E's digits at unseen scanners."""
    x, y = _digits()
    at = np.arange(len(x)) % 5

    def scanned(scanner: Scanner, site: int) -> tuple[np.ndarray, np.ndarray]:
        images = scanner(x[at == site]).round().clip(0, 255).astype(np.uint8)
        return images, y[at == site]

    sites = {name: scanned(one, k) for k, (name, one) in enumerate(SCANNERS.items())}
    return sites, {name: scanned(one, 4) for name, one in UNSEEN.items()}


def heart(folder: Path) -> tuple[Sites, Sites]:
    """Return the patients of each hospital, scaled as in ``apps.heart``."""
    import pandas as pd

    from apps.heart import SCALE

    sites: Sites = {}
    mean, std = pd.DataFrame(SCALE).to_numpy("float32")
    for path in sorted((folder / "heart_disease").glob("*.csv")):
        table = pd.read_csv(path, na_values="?")
        x = ((table[list(SCALE)].astype("float32") - mean) / std).fillna(0.0)
        sites[path.stem] = x.to_numpy(), (table["target"] > 0).to_numpy("int64")
    return sites, {}


def _resized(images: np.ndarray, side: int) -> np.ndarray:
    x = torch.from_numpy(images).float()
    x = x.permute(0, 3, 1, 2) if x.ndim == 4 else x[:, None]
    x = functional.interpolate(x, (side, side), mode="area")
    return x.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()


def mnists(folder: Path) -> tuple[Sites, Sites]:
    """Return 1,500 images of MNIST, USPS and MNIST-M each, grey."""
    import gzip

    def idx(name: str, skip: int) -> np.ndarray:
        with gzip.open(folder / "MNIST/raw" / f"{name}-ubyte.gz") as file:
            return np.frombuffer(file.read(), np.uint8, offset=skip)

    images = idx("train-images-idx3", 16).reshape(-1, 28, 28)
    read = {"MNIST": (images, idx("train-labels-idx1", 8))}
    for name in ("usps", "mnist_m"):
        (path,) = (folder / name).glob("*.npz")
        with np.load(path) as file:
            read[name] = file["x_train"], file["y_train"]
    sites: Sites = {}
    for name, (x, y) in read.items():
        chosen = np.random.default_rng(0).permutation(len(x))[:1500]
        x = x[chosen].mean(3) if x.ndim == 4 else x[chosen]
        sites[name] = _resized(x, 16)[..., 0], y[chosen].astype("int64")
    return sites, {}


def office(folder: Path) -> tuple[Sites, Sites]:
    """Return the images of the four domains."""
    sites: Sites = {}
    for path in sorted((folder / "office_caltech10").glob("*.npz")):
        with np.load(path) as file:
            x = np.concatenate([file["x_train"], file["x_test"]])
            y = np.concatenate([file["y_train"], file["y_test"]])
        sites[path.stem] = _resized(x, 32), y.astype("int64")
    return sites, {}


@dataclass(frozen=True)
class Source:
    """A data set, and how it is trained."""

    read: Callable[[Path], tuple[Sites, Sites]]
    model: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1, 2)


SOURCES: Mapping[str, Source] = {
    "digits": Source(digits, "new_site:small"),
    "heart": Source(
        heart,
        "apps.heart:net",
        {"num-server-rounds": 40, "learning-rate": 0.02, "task": "classification"},
    ),
    "mnists": Source(mnists, "new_site:small", seeds=(0,)),
    "office": Source(office, "new_site:deeper", seeds=(0,)),
}
TRAINING: Mapping[str, Any] = {
    "num-server-rounds": 20,
    "batch-size": 16,
    "learning-rate": 0.05,
    "eval-every": 20,
}


# The models.


@dataclass(frozen=True)
class Trained:
    """The model of a training with averaged statistics, and the class moments."""

    model: nn.Module
    moments: ClassMoments


def _inputs(x: np.ndarray) -> Tensor:
    """Return the inputs of an exported model."""
    if x.dtype != np.uint8:
        return torch.from_numpy(x)
    images = torch.from_numpy(x).float()
    return images.permute(0, 3, 1, 2) if images.ndim == 4 else images[:, None]


def train(
    source: Source, sites: Sites, method: str, seed: int, folder: Path
) -> Trained:
    """Train without a site, or read the finished training."""
    draw = np.random.default_rng(0)
    names = list(sites)
    parts = {name: draw.random(len(y)) < 0.25 for name, (_, y) in sites.items()}
    if not (folder / "averaged.safetensors").exists():
        # Remove what a killed training has left.
        shutil.rmtree(folder, ignore_errors=True)
        data = folder / "data.npz"
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(
            data,
            x=np.concatenate([x for x, _ in sites.values()]),
            y=np.concatenate([y for _, y in sites.values()]),
            client=np.repeat(names, [len(y) for _, y in sites.values()]),
            split=np.where(np.concatenate([*parts.values()]), "test", "train"),
        )
        settings = {
            **TRAINING,
            "dataset": f"npz:{data.resolve()}",
            "num-clients": len(names),
            "model": source.model,
            "seed": seed,
            **METHODS[method],
            **source.settings,
        }
        out = folder / "run"
        run(Config.make(settings), out, workers=0)
        own = METHODS[method]["strategy"] in ("fedbn", "silobn")
        for k, name in enumerate(names):
            choice = Choice(client=k) if own else Choice()
            export_model(out, folder / f"{name}.safetensors", "torch", choice)
        averaged = Choice(averaged=True) if own else Choice()
        export_model(out, folder / "averaged.safetensors", "torch", averaged)
    moments = []
    for name, (x, y) in sites.items():
        model = load_exported(folder / f"{name}.safetensors")
        rows = ~parts[name]
        labelled = (_inputs(x[rows]), torch.from_numpy(y[rows]))
        moments.append(class_moments(model, [labelled]))
    averaged_model = load_exported(folder / "averaged.safetensors")
    return Trained(averaged_model, pool_class_moments(moments))


# The cells.


def mixes(y: np.ndarray, mix: str, training: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the positions of the examples of each draw of a class mix."""
    of = [np.flatnonzero(y == k) for k in range(len(training))]
    present = [k for k, rows in enumerate(of) if len(rows)]
    if mix == "own":
        yield np.arange(len(y))
        return
    if mix == "training":
        total = min(len(of[k]) / training[k] for k in range(len(of)) if training[k])
        counts = [int(total * share + 1e-9) for share in training]
        draw = np.random.default_rng(0)
        chosen = [
            draw.permutation(rows)[:n] for rows, n in zip(of, counts, strict=True)
        ]
        yield np.sort(np.concatenate(chosen))
        return
    for seed in range(DRAWS):
        draw = np.random.default_rng(seed)
        if mix == "two":
            if len(training) > 2:
                yield np.flatnonzero(np.isin(y, draw.choice(present, 2, False)))
            continue
        k = int(draw.choice(present))
        others = np.flatnonzero(y != k)
        few = draw.choice(others, min(len(others), len(of[k]) // 4), False)
        yield of[k] if mix == "one" else np.sort(np.r_[of[k], few])


def measured(
    trained: Trained, x: np.ndarray, y: np.ndarray, rows: np.ndarray
) -> dict[str, Any]:
    """Return the accuracy of each way and the judgement of "auto" for a draw."""
    inputs, targets = _inputs(x[rows]), torch.from_numpy(y[rows])
    if len(rows) < 2:
        return {}
    found: dict[str, Any] = {"examples": len(rows)}

    def accuracy(way: Any, moments: ClassMoments | None) -> Any:
        result = calibrate(trained.model, [inputs], way, class_moments=moments)
        assert result.probabilities is not None
        right = result.probabilities.argmax(1) == targets
        return float(right.double().mean()), result

    for way in WAYS:
        found[way], _ = accuracy(way, trained.moments)
    for name, moments in (("auto", trained.moments), ("auto-", None)):
        found[name], result = accuracy("auto", moments)
        found[f"{name} way"] = result.way
        found[f"{name} trusted"] = result.trusted
    return found


def cells(out: Path, data_dir: Path, only: list[str], methods: list[str]) -> None:
    """Compute the missing cells of data sets and methods, into ``cells.jsonl``."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "cells.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    done = {json.dumps(json.loads(line)["cell"]) for line in lines}
    for name in only:
        source = SOURCES[name]
        sites, unseen = source.read(data_dir)
        for seed in source.seeds:
            for left_out in sites:
                for method in methods:
                    rest = {k: v for k, v in sites.items() if k != left_out}
                    new = {left_out: sites[left_out]}
                    new |= unseen if left_out == list(sites)[-1] else {}
                    folder = out / name / f"{left_out}-{method}-{seed}"
                    wanted = [
                        (site, mix)
                        for site in new
                        for mix in MIXES
                        if json.dumps([name, site, method, seed, mix]) not in done
                    ]
                    if not wanted:
                        continue
                    trained = train(source, rest, method, seed, folder)
                    training = trained.moments.class_mix.numpy()
                    for site, mix in wanted:
                        x, y = new[site]
                        draws = [
                            measured(trained, x, y, rows)
                            for rows in mixes(y, mix, training)
                        ]
                        row = {"cell": [name, site, method, seed, mix], "draws": draws}
                        with path.open("a") as file:
                            file.write(json.dumps(row) + "\n")
                    print(name, left_out, method, seed, flush=True)


def design(out: Path, data_dir: Path) -> None:
    """Compute, on the cells of the design, the accuracy of "early" by its layers."""
    rows: dict[str, list[list[float]]] = {}
    sites, unseen = SOURCES["digits"].read(data_dir)
    new_sites = {"A": ["A"], "E": ["E", "gamma", "blurred"]}
    for left_out, names in new_sites.items():
        rest = {k: v for k, v in sites.items() if k != left_out}
        folder = out / "digits" / f"{left_out}-FedBN-0"
        trained = train(SOURCES["digits"], rest, "FedBN", 0, folder)
        for mix, name in itertools.product(MIXES, names):
            x, y = (sites | unseen)[name]
            for chosen in mixes(y, mix, trained.moments.class_mix.numpy()):
                right = []
                for layers in range(len(trained.moments.first) + 1):
                    found = calibrate(
                        trained.model, [_inputs(x[chosen])], "early", early=layers
                    ).probabilities
                    assert found is not None
                    right.append(float((found.argmax(1).numpy() == y[chosen]).mean()))
                rows.setdefault(mix, []).append(right)
    means = {mix: np.mean(values, 0).tolist() for mix, values in rows.items()}
    (out / "design.json").write_text(json.dumps(means))


# The page.

COLUMNS = {
    "none": "averaged BN",
    **{way: way for way in WAYS[1:]},
    "auto": "auto",
    "auto-": "auto, no moments",
}
Cell = tuple[str, str, str, int, str]
Rows = list[tuple[Cell, Mapping[str, Any]]]
"""Each draw, with its cell (data set, new site, method, seed, class mix)."""


def draws_in(path: Path) -> Rows:
    """Return all draws of a file of cells."""
    rows: Rows = []
    for line in path.read_text().splitlines():
        read = json.loads(line)
        rows += [(tuple(read["cell"]), draw) for draw in read["draws"] if draw]
    return rows


def _means(draws: list[Mapping[str, Any]]) -> str:
    """Return the cells of a row: accuracies, the choice of auto, and its trust."""
    accuracies = [
        f"{100 * float(np.mean([draw[key] for draw in draws])):.1f}" for key in COLUMNS
    ]
    ways = Counter(draw["auto way"] for draw in draws)
    chosen = ", ".join(f"{way} {n}" for way, n in ways.most_common())
    trusted = sum(draw["auto trusted"] for draw in draws)
    return f"{' | '.join(accuracies)} | {chosen} | {trusted} of {len(draws)} |"


def _table(rows: Rows, names: Mapping[str, Callable[[Cell], Any]]) -> Iterator[str]:
    """Yield a table with a row for each value of the named columns."""
    yield f"| {' | '.join([*names, *COLUMNS.values(), 'way of auto', 'trusted'])} |"
    yield "|---" * (len(names) + len(COLUMNS) + 2) + "|"
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for cell, draw in rows:
        key = tuple(str(value(cell)) for value in names.values())
        groups.setdefault(key, []).append(draw)
    for key, draws in groups.items():
        yield f"| {' | '.join(key)} | {_means(draws)}"


def _missing(rows: Rows, data_dir: Path) -> str:
    """Return a sentence on the cells without a result."""
    done = {cell[:4] for cell, _ in rows}
    missing = []
    for name, source in SOURCES.items():
        sites, unseen = source.read(data_dir)
        new_sites = [*sites, *unseen]
        for seed, method in itertools.product(source.seeds, METHODS):
            absent = [
                site for site in new_sites if (name, site, method, seed) not in done
            ]
            which = "all sites" if absent == new_sites else ", ".join(absent)
            if absent:
                missing.append(f"{name}, {method}, seed {seed} ({which})")
    return f"Missing: {'; '.join(missing) or 'no cell'}."


def page(rows: Rows, data_dir: Path, of_design: Mapping[str, list[float]]) -> str:
    """Return the page of the results.

    ``of_design``: accuracies of "early" by the number of its layers, by class mix.
    """
    order = {mix: number for number, mix in enumerate(MIXES)}
    rows = sorted(
        rows, key=lambda row: (row[0][0], row[0][1], order[row[0][4]], row[0][2])
    )
    lines = [
        "---",
        "hide:",
        "  - toc",
        "---",
        "",
        "# A site that did not train",
        "",
        "Accuracy in per cent at a new site, after a calibration without labels. Each row"
        " is the mean over seeds and draws of a class mix. *way of auto* and *trusted*"
        " count draws. `benchmarks/new_site.py` has the protocol, names the cells from"
        " which the rules of `auto` come, and computes this page.",
        "",
        _missing(rows, data_dir),
    ]
    for key, name in (("auto", "with class moments"), ("auto-", "without them")):
        trusted = [one for one in rows if one[1][f"{key} trusted"]]
        others = [one for one in rows if not one[1][f"{key} trusted"]]
        means = [
            f"{100 * float(np.mean([draw[key] for _, draw in some] or [0])):.1f}"
            for some in (trusted, others)
        ]
        wrong = [one for one in trusted if one[1][key] < one[1]["none"] - 0.05]
        places = "; ".join(
            f"{', '.join(map(str, cell))}: {100 * draw[key]:.1f} instead of"
            f" {100 * draw['none']:.1f}"
            for cell, draw in wrong
        )
        lines += [
            "",
            f"`auto` {name} is trusted in {len(trusted)} of {len(rows)} draws. Its mean"
            f" accuracy is {means[0]} there, and {means[1]} in the others. In"
            f" {len(wrong)} of the trusted draws, it is more than 5 points below averaged BN"
            f"{f' ({places})' if wrong else ''}.",
        ]
    lines += ["", "## All sites", ""]
    # No way works with the inverted scanner, so it has rows of its own.
    lines += _table(
        sorted(rows, key=lambda row: (row[0][1] == "inverted", row[0][0])),
        {
            "data": lambda cell: cell[0] + ", inverted" * (cell[1] == "inverted"),
            "classes": lambda cell: cell[4],
        },
    )
    if of_design:
        lines += [
            "",
            "## Layers of `early`",
            "",
            "Accuracy with the first layers of four, on the digits of the design (FedBN,"
            " seed 0, new sites A, E, gamma and blurred). 0 layers are averaged BN, and 4"
            " are `all`. Half of the layers is the default: one more layer gains with the"
            " classes of the training, and loses more with one class.",
            "",
            "| classes | 0 | 1 | 2 | 3 | 4 |",
            "|---|---|---|---|---|---|",
        ]
        for mix, accuracies in of_design.items():
            shown = " | ".join(f"{100 * one:.1f}" for one in accuracies)
            lines.append(f"| {mix} | {shown} |")
    for name in SOURCES:
        of_data = [row for row in rows if row[0][0] == name]
        if of_data:
            lines += ["", f"## {name}", ""]
            lines += _table(
                of_data,
                {
                    "new site": lambda cell: cell[1],
                    "classes": lambda cell: cell[4],
                    "training": lambda cell: cell[2],
                },
            )
    return "\n".join(lines) + "\n"


def main(
    out: Annotated[Path, typer.Option(help="folder of trainings and cells")],
    data_dir: Annotated[Path, typer.Option(help="folder of the data sets")] = Path("."),
    only: Annotated[str, typer.Option(help="data sets, by comma")] = ",".join(SOURCES),
    methods: Annotated[str, typer.Option(help="by comma")] = ",".join(METHODS),
    write: Annotated[Path | None, typer.Option(help="write only the page")] = None,
) -> None:
    """Compute the missing cells, or write the page of those that are there."""
    torch.set_num_threads(1)
    # The runs import the models of this file and of apps.heart.
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    if write is None:
        cells(out, data_dir, only.split(","), methods.split(","))
        return
    if not (out / "design.json").exists():
        design(out, data_dir)
    of_design = json.loads((out / "design.json").read_text())
    write.write_text(page(draws_in(out / "cells.jsonl"), data_dir, of_design))


if __name__ == "__main__":
    typer.run(main)
