"""What a normalisation costs in inference: milliseconds for one image on one core, under torch and ONNX Runtime.

    python benchmarks/inference.py                       # prints the table
    python benchmarks/inference.py --write docs/performance.md

Each model is as it is taken home (``fold``): BatchNorm is folded into the convolutions, the derived filters of wsconv
and of GroupNorm with weight standardisation are plain weights; GroupNorm and LayerNorm stay, as they need each image's
statistics. The milliseconds are those of the CPU in one thread: on a core without other work they are the time that
passes. All models are measured in turns, so that the load of the machine meets them alike; a figure is the median over
the turns, of the fastest of some passes in each. The images are random, the weights as they begin: neither changes the
work.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import typer
from measure import facts, in_turns, number, table, write_block
from torch import Tensor, nn

from fedbn_flwr.lab.export import fold
from fedbn_flwr.lab.export.formats import encode_onnx
from fedbn_flwr.lab.models import build_model

MODELS = {"ResNet-18, 224 pixels": ("torchvision:resnet18", 224), "AlexNet, 256 pixels": ("alexnet-bn", 256)}
NORMS = {
    "BatchNorm, folded": "batch",
    "WSConv at rest": "wsconv",
    "no normalisation": "none",
    "GroupNorm, 2 groups": "group",
    "GroupNorm with weight standardisation": "group+ws",
    "LayerNorm": "layer",
}
Pass = Callable[[], object]


def taken_home(model: str, size: int, norm: str) -> nn.Module:
    """Return the model in eval mode, with all folded that can be."""
    built = build_model(model, num_classes=10, channels=3, size=size, norm=norm)
    return fold(built.eval(), torch.rand(2, 3, size, size))[0]


def onnx_pass(model: nn.Module, image: Tensor, folder: Path) -> Pass:
    """Return a pass of the model under ONNX Runtime, on one thread."""
    import onnxruntime

    path = folder / "model.onnx"
    path.write_bytes(encode_onnx(model, torch.cat([image, image]), {}))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda: session.run(["output"], {"input": image.numpy()})


def torch_pass(model: nn.Module, image: Tensor) -> Pass:
    """Return a pass of the model under torch, channels last."""
    model, image = model.to(memory_format=torch.channels_last), image.to(memory_format=torch.channels_last)

    def run() -> Tensor:
        with torch.inference_mode():
            out: Tensor = model(image)
            return out

    return run


def fastest(run: Pass, passes: int) -> Callable[[], Sequence[float]]:
    """Return what measures the fastest of some passes, in milliseconds."""

    def measure() -> list[float]:
        times = []
        for _ in range(passes):
            start = time.thread_time()
            run()
            times.append(1000 * (time.thread_time() - start))
        return [min(times)]

    return measure


def main(
    turns: Annotated[int, typer.Option(min=1)] = 15,
    passes: Annotated[int, typer.Option(min=1, help="passes in a turn, of which the fastest counts")] = 5,
    write: Annotated[Path | None, typer.Option(help="page whose table to replace")] = None,
) -> None:
    """Measure, and print or write the table."""
    torch.set_num_threads(1)
    ways: dict[str, Callable[[], Sequence[float]]] = {}
    with TemporaryDirectory() as folder:
        for shown, (name, size) in MODELS.items():
            image = torch.rand(1, 3, size, size)
            for kind, norm in NORMS.items():
                model = taken_home(name, size, norm)
                for runtime, run in (
                    ("torch", torch_pass(model, image)),
                    ("ONNX Runtime", onnx_pass(model, image, Path(folder))),
                ):
                    run()
                    ways[f"{shown}/{runtime}/{kind}"] = fastest(run, passes)
        found = in_turns(ways, turns)
    columns = [f"{shown}/{runtime}" for shown in MODELS for runtime in ("torch", "ONNX Runtime")]
    rows = []
    for kind in NORMS:
        cells = [kind]
        for column in columns:
            times = found[f"{column}/{kind}"]
            base = statistics.median(found[f"{column}/{next(iter(NORMS))}"])
            middle = statistics.median(times)
            cells.append(f"{number(middle)} ({middle / base:.2f})")
        rows.append(cells)
    text = table(["ms for an image (times BatchNorm)", *[column.replace("/", ", ") for column in columns]], rows)
    text += f"\n\nMedians of {turns} turns, the fastest of {passes} passes in each. {facts()}"
    print(text)
    if write:
        write_block(write, "inference", text)


if __name__ == "__main__":
    typer.run(main)
