"""``MODEL_CARD.md``: what an exported model is, how it was made and tested, and how to use it; a template of Jinja2."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from fedbn_flwr.lab.config import CENTRALIZED, Config, Scalar
from fedbn_flwr.lab.data import partition_table
from fedbn_flwr.lab.export import Folding
from fedbn_flwr.lab.files import read_json, read_metrics
from fedbn_flwr.lab.finished_runs.saved_model import SavedModel
from fedbn_flwr.lab.output.folder import PLACES
from fedbn_flwr.lab.output.summary import versions
from fedbn_flwr.lab.partitioned.partitioned_data import PartitionedData
from fedbn_flwr.lab.partitioned.report import data_report
from fedbn_flwr.lab.partitioned.splitting import count_split
from fedbn_flwr.training.tasks import BINARY

if TYPE_CHECKING:
    from fedbn_flwr.lab.finished_runs.export import Check

__all__ = ["CARD", "dataset_name", "model_card"]

CARD = "MODEL_CARD.md"

_PACKAGES = {"torch": (), "torch-export": (), "onnx": ("onnx", "onnxscript", "onnxruntime")}
_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    trim_blocks=True,
    keep_trailing_newline=True,
    undefined=StrictUndefined,
)


def model_card(
    saved: SavedModel,
    data: PartitionedData | None,
    file: Path,
    format: str,
    check: Check,
    folding: Folding | None,
    normalise: bool,
    probabilities: bool,
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
        probabilities: whether the outputs are probabilities.
    """
    config, content = saved.config, file.read_bytes()
    about_file = {
        "file": f"`{file.name}`, {format}, {len(content):,} bytes",
        "SHA-256 of the file": f"`{hashlib.sha256(content).hexdigest()}`",
        "model": f"{config.model}, norm={config.norm}",
        "what it is": saved.what,
        "check": check,
    }
    if folding:
        about_file["folded"] = "; ".join(folding.lines())
    tables, about_counts = _counts(saved, data)
    packages = versions(*_PACKAGES[format])
    return _TEMPLATES.get_template("model_card.md.jinja").render(
        config=config,
        data_name=dataset_name(config),
        format=format,
        file=file.name,
        about_file=about_file,
        inputs=dict(_inputs(saved, format, normalise, probabilities)),
        training=dict(_training(saved)),
        tables=tables,
        about_counts=about_counts,
        partition_table=partition_table,
        run=saved.run.name,
        versions={name: version for name, version in packages.items() if version != "not installed"},
        settings=yaml.safe_dump(_without_places(config), sort_keys=False).strip(),
        **_metrics(saved.run),
    )


def _without_places(config: Config) -> dict[str, Scalar]:
    """Return the settings without folders of the machine that did the run."""
    settings = {key: value for key, value in config.to_mapping().items() if key not in PLACES}
    return {**settings, "dataset": dataset_name(config), "init": Path(config.init).name}


def dataset_name(config: Config) -> str:
    """Return the name of the data set; for own data the kind and the last part of the path."""
    kind, colon, path = config.dataset.partition(":")
    return f"{kind}{colon}{Path(path).name}"


def _inputs(saved: SavedModel, format: str, normalise: bool, probabilities: bool) -> Iterator[tuple[str, str]]:
    """Yield what the model takes and gives."""
    taken = saved.description
    shape = f"({', '.join(['N', *map(str, taken.shape)])}), any number N"
    scaled_by_client = not taken.mean and saved.config.standardise == "local"
    if normalise and not scaled_by_client:
        types = "float32 or uint8" if format == "torch" and taken.as_bytes else "float32"
        values = "pixels 0 to 255" if taken.as_bytes else "as the data hold them"
        missing = "; NaN where a number is missing, which becomes the mean" if taken.normalise().missing else ""
        if missing and any("=" in name for name in taken.features):
            missing += "; a missing text is 0 in all features of its column"
        yield "inputs", f"{types} {shape}; {values}{missing}"
    else:
        yield "inputs", f"float32 {shape}; normalised before the model"
    if taken.mean:
        x, what = ("pixels / 255", "channel") if taken.as_bytes else ("x", "feature")
        mean, std = [round(value, 6) for value in taken.mean], [round(value, 6) for value in taken.std]
        where = "in" if normalise else "not in"
        yield f"normalisation, {where} the file", f"({x} - mean) / std, mean {mean}, std {std} per {what}"
    elif scaled_by_client:
        text = (
            "each client's inputs with its own mean and std (standardise=local), other data with the mean and std of "
            "theirs"
        )
        yield "normalisation, not in the file", text
    if taken.features:
        yield "features, in this order", ", ".join(taken.features)
    what = "probabilities" if probabilities else "logits before any softmax or sigmoid"
    yield "outputs", f"float32 (N, outputs, ...), {what}; numbers for a regression"
    if taken.classes:
        yield "classes", ", ".join(f"{number} = {name}" for number, name in enumerate(taken.classes))
    if taken.task == BINARY.name:
        values = f", positive-values={saved.config.positive_values}" if saved.config.positive_values else ""
        of_output = "the output is its probability" if probabilities else "its probability is the sigmoid of the output"
        yield "positive class", f"{taken.positive or 1}{values}; {of_output}"


def _training(saved: SavedModel) -> Iterator[tuple[str, Any]]:
    config, summary = saved.config, read_json(saved.run / "summary.json")
    yield "method", config.title
    if config.strategy != CENTRALIZED:
        of_method = {name.replace("_", "-") for name in config.method().Params.model_fields} & {*config.keys("methods")}
        if settings := [f"{key}={value}" for key, value in config.to_mapping().items() if key in of_method]:
            yield "settings of the method", ", ".join(settings)
    if privacy := summary.get("privacy"):
        yield "privacy", privacy["guarantee"]
    rounds = summary.get("rounds", f"{config.num_server_rounds} (from the settings)")
    best = summary.get("best-validation", {}).get("round")
    yield "rounds", f"{rounds}, the model is that of round {best}" if best else rounds
    yield "clients", config.num_clients or "as many as the federation had"
    yield "seed", config.seed
    if "diverged-at" in saved.about:
        yield "diverged", f"since round {saved.about['diverged-at']}: **not a model to use**"
    yield "SHA-256 of the run's final state", f"`{saved.about.get('sha256', 'not recorded')}`"


def _counts(saved: SavedModel, data: PartitionedData | None) -> tuple[Sequence[Any], str]:
    """Return the counts of the clients by class or domain, and the last line about the data."""
    if saved.config.protected:
        return (), "The counts of the clients are left out, because the run protects their data."
    if data is None:
        return (), "The data of the run are not where this card was written, so there are no counts here."
    if _changed(saved, data):
        return (), "The data have changed since the run, so there are no counts here."
    held_out = sum(len(tests) for _, tests in data.held_out)
    more = f", and {held_out} of the held-out clients ({', '.join(data.held_out_names)})" if held_out else ""
    tables = count_split(saved.config.model_copy(update={"device": "cpu"}))
    return tables, f"{len(data.test_view())} test examples{more}."


def _changed(saved: SavedModel, data: PartitionedData) -> bool:
    """Return whether own data have other counts than in the run's ``data.json``, if it is here."""
    path = saved.run / "data.json"
    if not path.is_file():
        return False
    before, now = read_json(path), data_report(data, saved.config).figures
    return any(before.get(key) != value for key, value in now.items() if "examples" in key)


def _metrics(run: Path) -> dict[str, Any]:
    """Return the result of the run and its tables; nothing without ``summary.json``."""
    summary = read_json(run / "summary.json")
    if not summary:
        return {"final": {}}
    final, definitions = summary["final"], summary.get("definitions", {})
    lines = read_metrics(run / "metrics.jsonl")
    tested: dict[str, dict[str, Any]] = next(
        (line.get("clients", {}) for line in lines if line["round"] == final.get("round")), {}
    )
    names = sorted({name for metrics in tested.values() for name in metrics if name.startswith(("own-", "global-"))})
    figures = [
        (name, _shown(value), definitions.get(name, ""))
        for name, value in final.items()
        if isinstance(value, (int, float)) and name != "round"
    ]
    by_client = []
    for client, of_client in tested.items():
        cells = [_shown(of_client.get(name)) for name in names]
        by_client.append([client, *cells])
    return {"final": final, "figures": figures, "names_by_client": names, "by_client": by_client}


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


_TEMPLATES.filters["shown"] = _shown
