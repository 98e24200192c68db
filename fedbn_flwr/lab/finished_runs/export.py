"""Taking a model away: one file that runs without this package, checked against the evaluated model, and its card."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fedbn_flwr.checked_file import encode_safetensors, write_atomically
from fedbn_flwr.client.saved_state import read_state
from fedbn_flwr.errors import ConfigError, DataError, EngineError, FedBNError, StateError, unknown_name
from fedbn_flwr.lab.export import (
    Folding,
    encode_onnx,
    encode_torch_export,
    fold,
    packed,
    run_onnx,
    run_torch_export,
)
from fedbn_flwr.lab.export.formats import check_onnx_is_installed
from fedbn_flwr.lab.finished_runs.model_card import CARD, dataset_name, model_card
from fedbn_flwr.lab.finished_runs.saved_model import Choice, SavedModel, load_model
from fedbn_flwr.lab.output.model_description import MODEL_DESCRIPTION, ModelDescription
from fedbn_flwr.lab.partitioned.partitioned_data import PartitionedData, count_clients, load_data, partitioned_data
from fedbn_flwr.messages.records import to_state
from fedbn_flwr.training.copying import copied
from fedbn_flwr.training.memory_format import inputs_for

__all__ = ["BOUND", "FORMATS", "Check", "Exported", "Format", "export", "load_exported"]

logger = logging.getLogger("flwr")

Format = Literal["torch", "torch-export", "onnx"]
SUFFIXES: Mapping[str, str] = {"torch": ".safetensors", "torch-export": ".pt2", "onnx": ".onnx"}
FORMATS = get_args(Format)
BOUND = 1e-4
"""Largest error of the outputs that an exported file may have, divided by the largest output."""

_BATCHES = [1, 5, 26]  # examples of the check
_FOLDED, _NORMALISED, _PROBABILITIES = "folded", "normalised", "probabilities"


@dataclass(frozen=True)
class Check:
    """The comparison of a file with the evaluated model.

    Attributes:
        inputs: what the inputs were.
        error: largest difference of an output.
        largest: the largest absolute value of an output.
    """

    inputs: str
    error: float
    largest: float

    @property
    def relative(self) -> float:
        """The error divided by the largest output."""
        return self.error / max(self.largest, torch.finfo(torch.float32).tiny)

    def __str__(self) -> str:
        """Return the result as text."""
        return (
            f"max absolute error {self.error:.2e} of outputs up to {self.largest:.3g} ({self.relative:.1e}, allowed "
            f"{BOUND:.0e}), on {self.inputs}, in batches of {', '.join(map(str, _BATCHES))}"
        )


@dataclass(frozen=True)
class Exported:
    """What ``export`` wrote.

    Attributes:
        file: the model.
        card: its description, in Markdown.
        what: which model of the run it is.
        check: how far its outputs are from those of the evaluated model.
        folding: what was folded; None without ``fold_bn``.
    """

    file: Path
    card: Path
    what: str
    check: Check
    folding: Folding | None


def export(
    run: Path,
    out: Path,
    format: Format,
    choice: Choice | None = None,
    *,
    fold_bn: bool = False,
    normalise: bool = True,
    probabilities: bool = False,
) -> Exported:
    """Write a model of a run as a file, and ``MODEL_CARD.md`` beside it; nothing is written over.

    The file is loaded again, and its outputs are compared with those of the evaluated model, on test data of the run
    where these are here, else on random inputs.

    Args:
        run: the run's folder.
        out: the file to write; its suffix is that of the format.
        format: "torch" (the state, see ``load_exported``), "torch-export" or "onnx".
        choice: which model; None = the global one.
        fold_bn: BatchNorm becomes a part of the layers before it, see ``export.fold``.
        normalise: the model takes what the data hold (pixels 0..255); without, inputs that are normalised already.
        probabilities: the outputs are probabilities; without, logits. A regression has numbers in both cases.

    Raises:
        ConfigError: a file exists, the choice or the format does not fit, or the file of a user's model has changed.
        StateError: the run lacks the model, or a part of it.
        EngineError: the outputs differ by more than ``BOUND``, or a file cannot be written; no file is left.
    """
    card = out.parent / CARD
    _check_places(out, card, format)
    saved = load_model(run, choice or Choice())
    if changed := saved.description.code_changed():
        raise ConfigError(changed)
    if normalise and saved.lacks_scale:
        raise ConfigError(
            f"{run}: standardise=local, so each client has its own mean and std of inputs, and {saved.what} has none: "
            "the file would give wrong outputs for raw inputs. Choose a client's own model (--client K, or on a site "
            "--state-dir DIR), or --no-normalise for inputs that you standardise yourself."
        )
    examples, raw, what, data = _inputs(saved)
    model, folding = copied(saved.model).to(memory_format=torch.contiguous_format), None
    if fold_bn:
        model, folding = fold(model, examples[:2])
    layer = saved.description.normalise()
    given = raw if normalise else examples
    last = saved.description.probabilities() if probabilities else None
    about = _about(saved, folding, normalise, probabilities)
    content = _encode(format, packed(model, layer if normalise else None, last), model, given[:2], about)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, content)
        try:
            check = _check(packed(saved.model, None, last), _LOADERS[format](out), examples, given, what)
            write_atomically(card, model_card(saved, data, out, format, check, folding, normalise, probabilities))
        except BaseException:
            out.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise EngineError(f"out={str(out)!r} cannot be written: {error}.") from error
    return Exported(out, card, saved.what, check, folding)


def load_exported(path: str | Path) -> nn.Module:
    """Return the model of a file that ``export`` wrote with format "torch", in eval mode on the CPU.

    It takes what the data hold (pixels 0..255), unless it was exported without normalisation.

    Raises:
        ConfigError: the file is not one of these.
        StateError: the file cannot be read.
    """
    state, about = read_state(Path(path))
    if _NORMALISED not in about:
        raise ConfigError(f"{path} was not written by `fedbn-flwr export --format torch`.")
    taken = ModelDescription.read(about)
    if changed := taken.code_changed():
        logger.warning("%s: %s", path, changed)
    model = taken.model()
    if about[_FOLDED] == "true":
        model, _ = fold(model, torch.zeros(2, *taken.shape))
    model.load_state_dict(state)
    last = taken.probabilities() if about.get(_PROBABILITIES) == "true" else None
    return packed(model, taken.normalise() if about[_NORMALISED] == "true" else None, last)


_LOADERS: dict[str, Callable[[Path], Any]] = {
    "torch": load_exported,
    "torch-export": run_torch_export,
    "onnx": run_onnx,
}
"""By format, what returns the model of a file."""


def _check_places(out: Path, card: Path, format: str) -> None:
    if format not in FORMATS:
        raise unknown_name("format", format, FORMATS)
    problems = []
    for path, what in ((out, "file"), (card, "folder: each exported model has its card beside it")):
        if path.exists():
            problems.append(f"{path} is there; nothing is written over. Choose another {what}.")
    if out.suffix != SUFFIXES[format]:
        problems.append(f"out={str(out)!r}: a file of format={format} ends in {SUFFIXES[format]}.")
    if problems:
        raise ConfigError("\n".join(problems))
    if format == "onnx":
        check_onnx_is_installed()


def _inputs(saved: SavedModel) -> tuple[Tensor, Tensor, str, PartitionedData | None]:
    """Return inputs of the check, normalised and as the data hold them, what they are, and the data if they are here.

    Inputs are float32 (32, ...).
    """
    count, taken = sum(_BATCHES), saved.description
    config = saved.config.model_copy(update={"device": "cpu"})
    data, why = None, "the data of the run are not here"
    with suppress(DataError, ConfigError):
        data = partitioned_data(config, count_clients(config))
    if data is not None and data.dataset.test.shape != taken.shape:
        data, why = None, "the data have changed since the run"
    test = None
    if data is not None:  # as read; but inputs that no scale of the model standardises
        test = data.dataset.test if saved.lacks_scale else load_data(config).test
    if test is not None and len(test):
        positions = torch.linspace(0, len(test) - 1, count).long()
        what = f"{min(count, len(test))} test examples of {dataset_name(config)}"
        raw = test.take(positions)[0].float()
        return taken.normalise()(raw), raw, what, data  # other data may be there now, with another mean and std
    generator = torch.Generator().manual_seed(0)
    raw = torch.rand(count, *taken.shape, generator=generator)
    raw = (raw * 256).floor() if taken.as_bytes else raw
    return taken.normalise()(raw), raw, f"{count} random inputs, since {why}", None


def _about(saved: SavedModel, folding: Folding | None, normalise: bool, probabilities: bool) -> dict[str, str]:
    """Return the metadata of the file."""
    return {
        "format": "pt",
        "model": saved.config.model,
        "what": saved.what,
        MODEL_DESCRIPTION: saved.description.to_json(),
        _FOLDED: json.dumps(bool(folding and (folding.folded or folding.baked))),
        _NORMALISED: json.dumps(normalise),
        _PROBABILITIES: json.dumps(probabilities),
    }


def _encode(format: str, packed: nn.Module, model: nn.Module, example: Tensor, about: Mapping[str, str]) -> bytes:
    if format == "torch":
        return encode_safetensors(to_state(model.state_dict()), about)
    encode = encode_onnx if format == "onnx" else encode_torch_export
    try:
        return encode(packed, example, about)
    except FedBNError:
        raise
    except Exception as error:  # torch.export raises many kinds for models that it cannot trace
        first = str(error).strip().split("\n")[0]
        raise EngineError(
            f"torch.export cannot take this model ({type(error).__name__}: {first}). Use format=torch."
        ) from error


@torch.no_grad()
def _check(model: nn.Module, exported: Callable[[Tensor], Tensor], examples: Tensor, given: Tensor, what: str) -> Check:
    """Compare the outputs batch by batch; raise EngineError above the bound."""
    error = largest = 0.0
    prepared = inputs_for(model)
    for batch, raw in zip(torch.split(examples, _BATCHES), torch.split(given, _BATCHES), strict=True):
        expected, outputs = model(prepared(batch)), exported(raw)
        if not expected.isfinite().all():
            raise StateError("the model's own outputs are not finite: it diverged. Export the model of another run.")
        if outputs.shape != expected.shape:
            raise EngineError(f"the file gives outputs {tuple(outputs.shape)}, the model {tuple(expected.shape)}.")
        difference = float((outputs - expected).abs().max())
        error = difference if math.isnan(difference) else max(error, difference)
        largest = max(largest, float(expected.abs().max()))
    check = Check(what, error, largest)
    if not check.relative <= BOUND:
        raise EngineError(
            f"the exported model is not the evaluated one: {check}. No file is written; please report it."
        )
    return check
