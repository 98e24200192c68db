"""``fedbn-flwr export``: a model of a run as one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fedbn_flwr.lab.cli.console import app, exit_codes, say


@app.command(epilog="Example: fedbn-flwr export runs/fedbn --client 2 --format onnx --fold-bn --out home/model.onnx")
def export(
    run: Annotated[Path, typer.Argument(help="Folder of the run; on a remote site its config.yaml and model suffice.")],
    format: Annotated[Literal["torch", "torch-export", "onnx"], typer.Option(help="The file's format.")],
    out: Annotated[Path, typer.Option(help="File to write, .safetensors, .pt2 or .onnx; MODEL_CARD.md is beside it.")],
    client: Annotated[int | None, typer.Option(help="This client's own model. Default: the global model.")] = None,
    bn: Annotated[Literal["averaged"] | None, typer.Option(help="The average of the BN that the clients keep.")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="State folder of this site: its own model.")] = None,
    fold_bn: Annotated[bool, typer.Option("--fold-bn", help="Fold BN into the layers before it.")] = False,
    normalise: Annotated[bool, typer.Option(help="The model takes pixels 0..255, as the data hold them.")] = True,
) -> None:
    """Write a model of a run as one file, checked against the evaluated model, with a model card."""
    from fedbn_flwr.lab.finished_runs.export import export as write
    from fedbn_flwr.lab.finished_runs.saved_model import Choice

    with exit_codes():
        choice = Choice(client, bn is not None, state_dir)
        done = write(run, out, format, choice, fold_bn=fold_bn, normalise=normalise)
        say(f"model: {done.what}")
        for line in done.folding.lines(shown=3) if done.folding else ():
            say(line)
        say(f"check: {done.check}")
        say(f"file: {done.file.absolute()}")
        say(f"card: {done.card.absolute()}")
