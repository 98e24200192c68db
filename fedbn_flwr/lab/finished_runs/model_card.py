"""``MODEL_CARD.md``: what an exported model is, how it was made and tested, and how to use it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from fedbn_flwr.lab.config import CENTRALIZED, Config, Scalar
from fedbn_flwr.lab.data import partition_table
from fedbn_flwr.lab.export import Folding
from fedbn_flwr.lab.files import read_json, read_metrics
from fedbn_flwr.lab.finished_runs.saved_model import SavedModel
from fedbn_flwr.lab.output.folder import PLACES
from fedbn_flwr.lab.output.versions import versions
from fedbn_flwr.lab.partitioned.partitioned_data import PartitionedData
from fedbn_flwr.lab.partitioned.report import data_report
from fedbn_flwr.lab.partitioned.splitting import count_split

if TYPE_CHECKING:
    from fedbn_flwr.lab.finished_runs.export import Check

__all__ = ["CARD", "dataset_name", "model_card"]

CARD = "MODEL_CARD.md"

_PACKAGES = {"torch": (), "torch-export": (), "onnx": ("onnx", "onnxscript", "onnxruntime")}
_USE = {
    "torch": """from fedbn_flwr.lab.finished_runs.export import load_exported

model = load_exported("{name}")
logits = model(inputs)""",
    "torch-export": """import torch

model = torch.export.load("{name}").module()
logits = model(inputs)""",
    "onnx": """import onnxruntime

session = onnxruntime.InferenceSession("{name}")
(logits,) = session.run(["output"], {{"input": inputs}})""",
}


def model_card(
    saved: SavedModel,
    data: PartitionedData | None,
    file: Path,
    format: str,
    check: Check,
    folding: Folding | None,
    normalise: bool,
) -> str:
    """Return the card of an exported model, Markdown.

    Args:
        saved: the evaluated model.
        data: the data of the run; None if they are elsewhere.
        file: the exported file.
        format: its format.
        check: the comparison of the file with the evaluated model.
        folding: what was folded, if anything.
        normalise: whether the normalisation is in the file.
    """
    config = saved.config
    content = file.read_bytes()
    sections = [
        f"# {config.model}, trained on {dataset_name(config)} with {config.title}",
        _list(
            {
                "file": f"`{file.name}`, {format}, {len(content):,} bytes",
                "SHA-256 of the file": f"`{hashlib.sha256(content).hexdigest()}`",
                "model": f"{config.model}, norm={config.norm}",
                "what it is": saved.what,
                "check": f"{check}",
                **({"folded": "; ".join(folding.lines())} if folding else {}),
            }
        ),
        "## Use",
        f"```python\n{_USE[format].format(name=file.name)}\n```",
        _list(dict(_inputs(saved, format, normalise))),
        "## Training",
        _list(dict(_training(saved))),
        "## Data",
        *_data(saved, data),
        "## Metrics",
        *_metrics(saved.run),
        "## Versions and settings",
        _list({name: found for name, found in versions(*_PACKAGES[format]).items() if found != "not installed"}),
        f"```yaml\n{yaml.safe_dump(_without_places(config), sort_keys=False).strip()}\n```",
    ]
    return "\n\n".join(sections) + "\n"


def _without_places(config: Config) -> dict[str, Scalar]:
    """Return the settings without folders of the machine that did the run."""
    found = {key: value for key, value in config.to_mapping().items() if key not in PLACES}
    return {**found, "dataset": dataset_name(config), "init": Path(config.init).name}


def dataset_name(config: Config) -> str:
    """Return the name of the data set; for own data the kind and the last part of the path."""
    kind, colon, path = config.dataset.partition(":")
    return f"{kind}{colon}{Path(path).name}"


def _list(items: Mapping[str, Any]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in items.items())


def _inputs(saved: SavedModel, format: str, normalise: bool) -> Iterator[tuple[str, str]]:
    """Yield what the model takes and gives."""
    taken = saved.description
    shape = f"({', '.join(['N', *map(str, taken.shape)])}), any number N"
    own = not taken.mean and saved.config.standardise == "local"
    values = "pixels 0 to 255" if taken.as_bytes else "as the data hold them"
    values += "; NaN where a value is missing, which becomes the mean" if taken.normalise().missing else ""
    if normalise and not own:
        yield "inputs", f"float32{' or uint8' if format == 'torch' and taken.as_bytes else ''} {shape}; {values}"
    else:
        yield "inputs", f"float32 {shape}; normalised before the model"
    if taken.mean:
        x, what = ("pixels / 255", "channel") if taken.as_bytes else ("x", "feature")
        mean, std = ([round(value, 6) for value in values] for values in (taken.mean, taken.std))
        where = "in" if normalise else "not in"
        yield f"normalisation, {where} the file", f"({x} - mean) / std, mean {mean}, std {std} per {what}"
    elif own:
        yield (
            "normalisation, not in the file",
            (
                "each client's inputs with its own mean and std (standardise=local), "
                "other data with the mean and std of theirs"
            ),
        )
    if taken.features:
        yield "features, in this order", ", ".join(taken.features)
    yield "outputs", "float32 (N, outputs, ...), logits before any softmax or sigmoid; numbers for a regression"
    if names := taken.classes:
        yield "classes", ", ".join(f"{number} = {name}" for number, name in enumerate(names))


def _training(saved: SavedModel) -> Iterator[tuple[str, Any]]:
    config = saved.config
    yield "method", config.title
    if config.strategy != CENTRALIZED:
        own = {name.replace("_", "-") for name in config.method().Params.model_fields} & {*config.keys("methods")}
        if settings := [f"{key}={value}" for key, value in config.to_mapping().items() if key in own]:
            yield "settings of the method", ", ".join(settings)
    summary = read_json(saved.run / "summary.json")
    rounds = summary.get("rounds", f"{config.num_server_rounds} (from the settings)")
    if privacy := summary.get("privacy"):
        yield "privacy", privacy["guarantee"]
    best = summary.get("best-validation", {}).get("round")
    yield "rounds", f"{rounds}, the model is that of round {best}" if best else rounds
    yield "clients", config.num_clients or "as many as the federation had"
    yield "seed", config.seed
    if "diverged-at" in saved.about:
        yield "diverged", f"since round {saved.about['diverged-at']}: **not a model to use**"
    yield "SHA-256 of the run's final state", f"`{saved.about.get('sha256', 'not recorded')}`"


def _data(saved: SavedModel, data: PartitionedData | None) -> Iterator[str]:
    config = saved.config
    yield _list({"data set": dataset_name(config), "split over the clients": config.partition})
    if config.protected:
        yield "The counts of the clients are left out, because the run protects their data."
        return
    if data is None:
        yield "The data of the run are not where this card was written, so there are no counts here."
        return
    if _changed(saved, data):
        yield "The data have changed since the run, so there are no counts here."
        return
    for table in count_split(config.model_copy(update={"device": "cpu"})):
        yield f"{table.of.capitalize()} examples by {table.what}, one row per client:"
        yield f"```text\n{partition_table(table.counts, table.names)}\n```"
    apart = sum(len(tests) for _, tests in data.held_out)
    more = f", and {apart} of the held-out clients ({', '.join(data.held_out_names)})" if apart else ""
    yield f"{len(data.test_view())} test examples{more}."


def _changed(saved: SavedModel, data: PartitionedData) -> bool:
    """Return whether own data have other counts than in the run's ``data.json``, if it is here."""
    path = saved.run / "data.json"
    if not path.is_file():
        return False
    before, now = read_json(path), data_report(data, saved.config).figures
    return any(before.get(key) != value for key, value in now.items() if "examples" in key)


def _metrics(run: Path) -> Iterator[str]:
    summary, lines = read_json(run / "summary.json"), read_metrics(run / "metrics.jsonl")
    if not summary:
        yield f"summary.json is not in {run.name}: whoever did the run has the metrics."
        return
    final = {key: value for key, value in summary["final"].items() if isinstance(value, (int, float))}
    line = next((line for line in lines if line["round"] == final.get("round")), {})
    told = summary.get("definitions", {})
    yield f"After round {final.pop('round', '?')}:"
    yield _table(["metric", "value", "definition"], [[key, _shown(v), told.get(key, "")] for key, v in final.items()])
    for metric, values in summary["final"].get("domains", {}).items():
        yield f"{metric} by domain:"
        yield _table(list(values), [[_shown(value) for value in values.values()]])
    tested: dict[str, dict[str, Any]] = line.get("clients", {})
    names = sorted({name for metrics in tested.values() for name in metrics if name.startswith(("own-", "global-"))})
    if tested:
        yield "By client, each on its own test data (`own-`) or on the whole test set (`global-`):"
        rows = [[client, *(_shown(metrics.get(name)) for name in names)] for client, metrics in tested.items()]
        yield _table(["client", *names], rows)


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])
