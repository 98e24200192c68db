"""A site that did not train: its BN as saved, re-estimated, guarded, of the nearest client and as a blend.

    python benchmarks/new_sites.py STUDY [STUDY ...] --out new-sites.csv

Each STUDY is the folder of a sweep whose splits hold out one site each (docs/results/*-leave-one-out.yaml). All
examples of the held-out site, without a look at their targets, are the new inputs; the targets then say what each
choice was worth. ``natural`` has the site as it is. In ``skewed`` classes are thinned: of two classes one keeps a tenth
(each in turn), of several those of the upper half do. Nothing is trained.
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from measure import table
from torch import Tensor

from fedbn_flwr.lab.finished_runs.new_site import ADAPT, AS_SAVED, choices
from fedbn_flwr.lab.finished_runs.saved_model import BLEND, NEAREST, Choice, load_model
from fedbn_flwr.lab.partitioned.partitioned_data import count_clients, partitioned_data
from fedbn_flwr.seeds import torch_generator
from fedbn_flwr.training.batches import Batches
from fedbn_flwr.training.evaluation import evaluate

METRICS = ("accuracy", "balanced-accuracy", "auroc")
GUARDED = "guarded"
Line = dict[str, str | float]


@dataclass(frozen=True)
class Some:
    """Some examples of several data sets, in order."""

    parts: tuple[Batches, ...]
    chosen: Tensor

    def __len__(self) -> int:
        return len(self.chosen)

    def batch(self, positions: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return the examples at the positions."""
        first, second = self.parts
        of_all = self.chosen[positions]
        here, there = of_all < len(first), of_all >= len(first)
        pieces = [part.batch(at) for part, at in ((first, of_all[here]), (second, of_all[there] - len(first)))]
        order = torch.argsort(torch.cat([here.nonzero(), there.nonzero()]).flatten())
        inputs, targets = (torch.cat(values)[order] for values in zip(*pieces, strict=True))
        return inputs, targets


def thinned(targets: Tensor, classes: int, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of a class mix, and the positions of the examples that it keeps."""
    everything = torch.arange(len(targets))
    yield "natural", everything
    few = [[0], [1]] if classes == 2 else [list(range(classes // 2, classes))]
    for number, rare in enumerate(few):
        draw = torch_generator(seed, "class mix", number)
        keep = torch.ones(len(targets), dtype=torch.bool)
        for c in rare:
            of_class = (targets == c).nonzero().flatten()
            keep[of_class[torch.randperm(len(of_class), generator=draw)[max(1, len(of_class) // 10) :]]] = False
        yield "skewed", everything[keep]


def lines_of(run: Path) -> Iterator[Line]:
    """Yield a line for each class mix and each choice of BN at the site that a run held out."""
    method, site, seed = run.parts[-3:]
    for parts in (False, True):
        if parts and not (run / "clients").is_dir():
            continue
        saved = load_model(run, Choice(parts=parts))
        config = saved.config
        views = partitioned_data(config, count_clients(config)).held_out_views(0)
        targets = torch.cat([view.targets for view in views]).long().flatten()
        task = config.test_task().measuring(METRICS)
        own = {name: value.clone() for name, value in saved.model.state_dict().items()}
        for number, (mix, chosen) in enumerate(thinned(targets, max(2, saved.description.num_classes), config.seed)):
            data = Some(views, chosen)
            for bn in (NEAREST, BLEND) if parts else (ADAPT,):
                found = choices(saved.model, data, task, saved, bn)
                for name, load in found.models.items():
                    if parts and name == AS_SAVED:
                        continue
                    saved.model.load_state_dict(own)
                    load(saved.model)
                    metrics = evaluate(saved.model, data, task=task).metrics
                    about = {
                        "method": method,
                        "site": site,
                        "seed": seed.removeprefix("seed-"),
                        "mix": f"{mix} {number}",
                    }
                    numbers = {metric: metrics[metric] for metric in METRICS}
                    kind = bn if parts else name
                    yield {**about, "examples": len(data), "BN": kind, **numbers}
                    if name == found.chosen and not parts:
                        yield {**about, "examples": len(data), "BN": GUARDED, **numbers}
                saved.model.load_state_dict(own)


def summary(lines: list[Line]) -> list[list[str]]:
    """Return for each method, mix and BN the mean over sites and seeds, and its difference to the BN as saved."""
    rows = []
    for method in dict.fromkeys(line["method"] for line in lines):
        for mix in ("natural", "skewed"):
            of_mix = [line for line in lines if line["method"] == method and str(line["mix"]).startswith(mix)]
            plain = _means(of_mix, AS_SAVED)
            for bn in (AS_SAVED, "re-estimated", "balanced", GUARDED, NEAREST, BLEND):
                means = _means(of_mix, bn)
                if means:
                    cells = [
                        f"{100 * mean:.2f} ({100 * (mean - of):+.2f})" for mean, of in zip(means, plain, strict=True)
                    ]
                    rows.append([str(method), mix, bn, *cells])
    return rows


def _means(lines: list[Line], bn: str) -> list[float]:
    found = [line for line in lines if line["BN"] == bn]
    return [sum(float(line[metric]) for line in found) / len(found) for metric in METRICS] if found else []


def main(
    studies: Annotated[list[Path], typer.Argument(help="Folders of sweeps.")],
    out: Annotated[Path | None, typer.Option(help="A CSV file with a line for each site and choice.")] = None,
) -> None:
    """Print a table for each study."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    every: list[Line] = []
    for study in studies:
        runs = [path.parent for path in sorted(study.glob("*/*/seed-*/summary.json"))]
        lines = [{"study": study.name, **line} for run in runs for line in lines_of(run)]
        print(f"{study.name}: {len(runs)} runs\n{table(['method', 'mix', 'BN', *METRICS], summary(lines))}\n")
        every += lines
    if out:
        with out.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(every[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows({k: f"{v:.6f}" if isinstance(v, float) else v for k, v in line.items()} for line in every)


if __name__ == "__main__":
    typer.run(main)
