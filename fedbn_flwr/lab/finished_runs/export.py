"""Write a model of a run as one file that works without the run.

The file's outputs are compared with the outputs of the evaluated model.
"""

from __future__ import annotations

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
from fedbn_flwr.client.personal_model import read_state
from fedbn_flwr.errors import (
    REMOVED,
    ConfigError,
    DataError,
    EngineError,
    FedBNError,
    StateError,
    unknown_name,
)
from fedbn_flwr.lab.export import (
    encode_onnx,
    encode_torch_export,
    normalised_inside,
    run_onnx,
    run_torch_export,
)
from fedbn_flwr.lab.export.formats import check_onnx_is_installed
from fedbn_flwr.lab.finished_runs.saved_model import Choice, SavedModel, load_model
from fedbn_flwr.lab.output.summary import MODEL_DESCRIPTION, ModelDescription
from fedbn_flwr.lab.partitioned.partitioned_data import load_data
from fedbn_flwr.messages.records import to_state
from fedbn_flwr.training.batches import inputs_for
from fedbn_flwr.training.model_state import copied

logger = logging.getLogger("flwr")

Format = Literal["torch", "torch-export", "onnx"]
SUFFIXES: Mapping[str, str] = {
    "torch": ".safetensors",
    "torch-export": ".pt2",
    "onnx": ".onnx",
}
FORMATS = get_args(Format)
BOUND = 1e-4
"""The largest error of an exported file's outputs, divided by the largest output."""

# batch sizes of the check, several to show that the file accepts any batch size
_BATCHES = [1, 5, 26]
# key of the file's metadata that has the description of the model
_WHAT = "what"


@dataclass(frozen=True)
class Check:
    """The comparison of a file with the evaluated model.

    Attributes:
        inputs: a description of the inputs.
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
            f"max absolute error {self.error:.2e} of outputs up to {self.largest:.3g}"
            f" ({self.relative:.1e}, allowed {BOUND:.0e}), on {self.inputs}, in batches"
            f" of {', '.join(map(str, _BATCHES))}"
        )


@dataclass(frozen=True)
class Exported:
    """The result of ``export``.

    Attributes:
        file: the file of the model.
        what: a description of the model.
        check: the distance of its outputs from the evaluated model's outputs.
    """

    file: Path
    what: str
    check: Check


def export(
    run: Path,
    out: Path,
    format: Format,
    choice: Choice | None = None,
) -> Exported:
    """Write a model of a run as a new file that takes inputs in the form of the data.

    The file is loaded again, and its outputs are compared with the evaluated model's
    outputs. The inputs of this check are test data of the run. If these data are not on
    this machine, the inputs are random.

    Args:
        run: the run's folder.
        out: the file to write, with the suffix of the format.
        format: "torch" (the state, see ``load_exported``), "torch-export" or "onnx".
        choice: the model to export; by default, the global model.

    Raises:
        ConfigError: the file exists, the choice or the format does not fit, or the file
            of a user's model has changed.
        StateError: the run lacks the model, or a part of it.
        EngineError: the outputs differ by more than ``BOUND``, or the file cannot be
            written; no file is left.
    """
    check_place(out, format)
    return export_model(load_model(run, choice or Choice()), out, format)


def export_model(saved: SavedModel, out: Path, format: Format) -> Exported:
    """Write a loaded model as a new file, see ``export``."""
    # Refuse changed code of the user's model: the file would contain another model, and
    # the check at the end compares two models of today's code, so it would not notice
    # the change.
    changed = saved.description.code_changed()
    if changed:
        raise ConfigError(changed)
    inputs, what = _inputs(saved)
    # Export a copy, because the check compares the file with the saved model.
    normalise = saved.description.normalise()
    model = copied(saved.model).to(memory_format=torch.contiguous_format)
    about = {
        "format": "pt",
        "model": saved.config.model,
        _WHAT: saved.what,
        MODEL_DESCRIPTION: saved.description.to_json(),
    }
    content = _encode(format, model, normalise, inputs[:2], about)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, content)
    except OSError as error:
        raise EngineError(f"out={str(out)!r} cannot be written: {error}.") from error
    # Load the file in the same way as a user, and check the loaded model. Remove the
    # file if the check fails.
    try:
        check = _check(saved.model, _LOADERS[format](out), normalise, inputs, what)
    except BaseException:
        out.unlink(missing_ok=True)
        raise
    return Exported(out, saved.what, check)


def load_exported(path: str | Path) -> nn.Module:
    """Return the model of a file that ``export`` wrote with format "torch".

    The model is in eval mode on the CPU. It takes inputs in the form of the data (pixels
    0..255).

    Raises:
        ConfigError: ``export`` did not write this file in the format "torch", or the
            file has folded BatchNorm layers.
        StateError: the file cannot be read.
    """
    state, about = read_state(Path(path))
    if _WHAT not in about:
        raise ConfigError(
            f"{path} was not written by `fedbn-flwr export --format torch`."
        )
    # Files of version 0.2 have the key "folded". Its value is "null" if no layer was
    # folded.
    if about.get("folded", "null") != "null":
        raise ConfigError(
            f"{path} was exported with --fold-bn.{REMOVED['--fold-bn']} Export the model"
            " again, without --fold-bn."
        )
    taken = ModelDescription.read(about)
    changed = taken.code_changed()
    if changed:
        logger.warning("%s: %s", path, changed)
    model = taken.model()
    model.load_state_dict(state)
    return normalised_inside(model, taken.normalise())


_LOADERS: dict[str, Callable[[Path], Any]] = {
    "torch": load_exported,
    "torch-export": run_torch_export,
    "onnx": run_onnx,
}
"""The function that returns the model of a file, by format."""


def check_place(out: Path, format: str) -> None:
    """Raise ConfigError if a file exists, or its name or its format is not allowed."""
    if format not in FORMATS:
        raise unknown_name("format", format, FORMATS)
    problems = []
    if out.exists():
        problems.append(
            f"{out} already exists, and is not overwritten. Choose another file."
        )
    if out.suffix != SUFFIXES[format]:
        problems.append(
            f"out={str(out)!r}: a file of format={format} ends in {SUFFIXES[format]}."
        )
    if problems:
        raise ConfigError("\n".join(problems))
    if format == "onnx":
        check_onnx_is_installed()


def _inputs(saved: SavedModel) -> tuple[Tensor, str]:
    """Return the inputs for the check of a file, and their description.

    The inputs are float32, in the form of the data.
    """
    count, taken = sum(_BATCHES), saved.description
    # Use test examples of the run, evenly spread over the test part.
    why = "the data of the run are not here"
    with suppress(DataError, ConfigError):
        test = load_data(saved.config.model_copy(update={"device": "cpu"})).test
        if test.shape == taken.shape and len(test):
            positions = torch.linspace(0, len(test) - 1, count).long()
            inputs, _ = test.take(positions)
            # Report only the last part of a path, because the text goes into a report
            # that others read.
            kind, colon, path = saved.config.dataset.partition(":")
            name = f"{kind}{colon}{Path(path).name}"
            used = min(count, len(test))
            return inputs.float(), f"{used} test examples of {name}"
        why = "the data have changed since the run"
    # Without the run's data, use random inputs of the same kind. Pixels are whole
    # numbers.
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(count, *taken.shape, generator=generator)
    if taken.as_bytes:
        inputs = (inputs * 256).floor()
    return inputs, f"{count} random inputs, since {why}"


def _encode(
    format: str,
    model: nn.Module,
    normalise: nn.Module,
    example: Tensor,
    about: Mapping[str, str],
) -> bytes:
    if format == "torch":
        return encode_safetensors(to_state(model.state_dict()), about)
    encode = encode_onnx if format == "onnx" else encode_torch_export
    try:
        return encode(normalised_inside(model, normalise), example, about)
    except FedBNError:
        raise
    # torch.export raises many kinds of errors for models that it cannot trace.
    except Exception as error:
        first = str(error).strip().split("\n")[0]
        raise EngineError(
            f"torch.export cannot take this model ({type(error).__name__}: {first})."
            " Use format=torch."
        ) from error


@torch.no_grad()
def _check(
    model: nn.Module,
    exported: Callable[[Tensor], Tensor],
    normalise: nn.Module,
    inputs: Tensor,
    what: str,
) -> Check:
    """Return the comparison of an exported model with the evaluated model.

    Raises:
        EngineError: the outputs differ by more than ``BOUND`` or in shape.
        StateError: the evaluated model's own outputs are not finite.
    """
    error = largest = 0.0
    prepared = inputs_for(model)
    for batch in torch.split(inputs, _BATCHES):
        expected, outputs = model(prepared(normalise(batch))), exported(batch)
        if not expected.isfinite().all():
            raise StateError(
                "the model's own outputs are not finite, since it diverged. Export the"
                " model of another run."
            )
        if outputs.shape != expected.shape:
            raise EngineError(
                f"the file gives outputs {tuple(outputs.shape)}, but the model gives"
                f" {tuple(expected.shape)}."
            )
        # Test for NaN first, because ``max`` may drop it.
        difference = float((outputs - expected).abs().max())
        error = difference if math.isnan(difference) else max(error, difference)
        largest = max(largest, float(expected.abs().max()))
    # Use ``not <=`` instead of ``>``, because ``>`` would accept NaN.
    check = Check(what, error, largest)
    if not check.relative <= BOUND:
        raise EngineError(
            f"the exported model differs from the evaluated model: {check}. No file is"
            " written. Please report it."
        )
    return check
