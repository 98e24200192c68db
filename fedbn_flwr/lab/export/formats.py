"""Write and run files with the graph of a model, in torch.export or ONNX.

A batch may have any number of examples. TorchScript is not offered, because torch has
deprecated it.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor, nn

from fedbn_flwr.errors import ConfigError, install_extra

Run = Callable[[Tensor], Tensor]


def encode_torch_export(
    model: nn.Module, example: Tensor, about: Mapping[str, str]
) -> bytes:
    """Return the ``.pt2`` file of a model.

    Args:
        model: the model in eval mode.
        example: a batch of at least two inputs.
        about: texts in addition to the graph, each in an extra file ``about.KEY``.
    """
    # The example must have several inputs: torch treats a batch of one as a constant,
    # and the file would then accept no other batch size.
    program = torch.export.export(
        model, (example,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},)
    )
    extra_files = {f"about.{key}": value for key, value in about.items()}
    file = BytesIO()
    torch.export.save(program, file, extra_files=extra_files)
    return file.getvalue()


def run_torch_export(path: Path) -> Run:
    """Return the function of a ``.pt2`` file, from inputs to outputs."""
    return torch.export.load(path).module()


def check_onnx_is_installed() -> None:
    """Raise ConfigError if a package of the extra ``onnx`` is absent."""
    names = ("onnx", "onnxscript", "onnxruntime")
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    if absent:
        raise ConfigError(
            f"format=onnx needs {', '.join(absent)}, but it is not installed."
            f" {install_extra('onnx')}. format=torch-export needs nothing more."
        )


def encode_onnx(model: nn.Module, example: Tensor, about: Mapping[str, str]) -> bytes:
    """Return the ``.onnx`` file of a model, with the names "input" and "output".

    The arguments are as for ``encode_torch_export``.
    """
    # torch.onnx prints long reports. Hide them.
    with _quiet("torch.onnx", "onnxscript", "onnx_ir"):
        program = torch.onnx.export(
            model,
            (example,),
            dynamo=True,
            verbose=False,
            input_names=["input"],
            output_names=["output"],
            dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
        )
    if program is None:
        raise ConfigError("torch.onnx.export returned no program")
    proto = program.model_proto
    for key, value in about.items():
        proto.metadata_props.add(key=key, value=value)
    content: bytes = proto.SerializeToString()
    return content


def run_onnx(path: Path) -> Run:
    """Return the function of an ``.onnx`` file under onnxruntime on the CPU."""
    # Import here, because onnxruntime is installed only with the extra ``onnx``.
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda inputs: torch.from_numpy(
        session.run(["output"], {"input": inputs.numpy()})[0]
    )


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Hide messages of these loggers, except errors."""
    levels = {name: logging.getLogger(name).level for name in names}
    try:
        for name in names:
            logging.getLogger(name).setLevel(logging.ERROR)
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
