"""What the layer, the server and the options of HBN's public code do, each driven alone; seconds, no data.

    git clone https://github.com/Hongyao-Chen/HybridBN && git -C HybridBN checkout 1c0e151
    python benchmarks/hybridbn_parts.py HybridBN --write docs/results/which-method.md

``hybridbn.py`` runs its script beside ours.
"""

from __future__ import annotations

import contextlib
import copy
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from hybridbn import public_modules
from measure import facts, table, write_block
from torch import Tensor, nn

ROUNDS = 501  # of its default run
WIDE = 64  # examples and positions: a batch of (WIDE, 1, 8, 8) has as many elements per channel as are counted here


def main(
    code: Annotated[Path, typer.Argument(help="A checkout of Hongyao-Chen/HybridBN at 1c0e151.")],
    write: Annotated[Path | None, typer.Option(help="Page with a place for the table.")] = None,
) -> None:
    """Drive the parts, and print the table."""
    with public_modules(code.resolve()):
        rows = [
            ["share of the batch at alpha = 1; sigmoid(-1) = 0.27 in the figure", f"{_share_of_batch():.2f}"],
            [
                "fixed point of its variance, without its division by count - 1; clients have variance 1 and means "
                "-0.5 and 0.5 (pooled: 1.25)",
                f"{_fixed_point((0.0, 0.0), (-0.5, 0.5))[1]:.3f}",
            ],
            [
                "fixed point of its mean; clients have means 0 and 1 and shares of the batch 0.2 and 0.8 (pooled: 0.5)",
                f"{_fixed_point((-_LOG4, _LOG4), (0.0, 1.0))[0]:.3f}",
            ],
            [
                "factor on the variance of two clients with 4 images of 64 pixels each; for the elements it is 1.002",
                f"{_correction():.3f}",
            ],
            [
                f"weight of the start (0, 1) in its statistics after {ROUNDS} rounds, without that division",
                f"{_weight_of_start(1.0):.3f}",
            ],
            ["the same with what its pass mixes in", f"{_weight_of_start(0.5):.3f}"],
            ["alpha of the global model, where two clients have 0 and 2 (it should stay with them)", _averaged_alpha()],
            ["eps of a layer that had 0.001", f"{_eps():g}"],
            ["BatchNorm1d and BatchNorm3d in a model, after its replacement", _kinds()],
            ["a layer without affine, in training", _without_affine()],
            ["the README's `--iid False`", _command()],
        ]
    text = f"{table(['public code, part by part', 'found'], rows)}\n\n{facts()}"
    print(text)
    if write:
        write_block(write, "hybridbn-parts", text)


_LOG4 = 1.3862943611198906  # sigmoid of it is 0.8


def _layer(factor: float = 0.0) -> Any:
    from FedBaseline.models.FedHBN.MyBNtool import HybridBatchNorm  # type: ignore[import-not-found]

    layer = HybridBatchNorm(1).double().train()
    with torch.no_grad():
        layer.distribution_factor.fill_(factor)
    return layer


def _server(state: dict[str, Tensor]) -> Any:
    from FedBaseline.models.FedHBN.server import Sever  # type: ignore[import-not-found]

    return Sever(args=None, w_glob=state)


def _surveyed(layer: Any, images: Tensor) -> dict[str, Tensor]:
    """Return a client's state after its pass, which records one batch."""
    from FedBaseline.models.FedHBN.MyBNtool import clear_bn_buffer

    mine = copy.deepcopy(layer)
    clear_bn_buffer(mine)
    with torch.no_grad():
        mine(images)
    return {name: value.double() for name, value in mine.state_dict().items()}


def _images(mean: float, examples: int = WIDE) -> Tensor:
    """Images of one channel with this mean and the biased variance 1."""
    half = torch.ones(examples // 2, 1, 8, 8, dtype=torch.float64)
    return mean + torch.cat([half, -half])


def _share_of_batch() -> float:
    return float(_surveyed(_layer(1.0), _images(1.0))["running_mean"])


def _fixed_point(factors: tuple[float, float], means: tuple[float, float]) -> tuple[float, float]:
    """Return the global mean and variance that stay as they are under fixed weights, found with momentum 1.

    The division by (count - 1) is taken off, which is another departure.
    """
    layers, images = [_layer(factor) for factor in factors], [_images(mean) for mean in means]
    for _ in range(200):
        states = [_surveyed(layer, own) for layer, own in zip(layers, images, strict=True)]
        state = _server(states[0]).aggregate_only_buffer([WIDE, WIDE], states)
        mean, var = state["global_mean"], state["global_var"] * (2 * WIDE - 1) / (2 * WIDE)
        for layer in layers:
            layer.global_mean.copy_(mean)
            layer.global_var.copy_(var)
    return float(mean), float(var)


def _correction() -> float:
    states = [_surveyed(_layer(800.0), _images(0.0, 4)) for _ in range(2)]
    return float(_server(states[0]).aggregate_only_buffer([4, 4], states)["global_var"])


def _weight_of_start(share: float) -> float:
    """Return what is left of a start of 1: all batches have variance 0, and a batch has this share in the pass."""
    layer, images = _layer(800.0 if share == 1.0 else 0.0), torch.zeros(WIDE, 1, 8, 8, dtype=torch.float64)
    for _ in range(ROUNDS):
        states = [_surveyed(layer, images) for _ in range(2)]
        server = _server({**states[0], "global_var": layer.global_var})
        new = server.aggregate_only_buffer([WIDE, WIDE], states, avg_momentum=0.002)["global_var"]
        old = layer.global_var.clone()
        # The division by (count - 1) is another departure: it is taken off the part that is new.
        layer.global_var.copy_(0.998 * old + (new - 0.998 * old) * (2 * WIDE - 1) / (2 * WIDE))
    return float(layer.global_var)


def _averaged_alpha() -> str:
    states = [dict(_layer(factor).state_dict()) for factor in (0.0, 2.0)]
    return f"{float(_server(states[0]).aggregate_without_buffer([1, 1], states)['distribution_factor']):.1f}"


def _replaced(layer: nn.Module) -> nn.Module:
    from FedBaseline.models.Nets import replace_bn_with_hbn  # type: ignore[import-not-found]

    model = nn.Sequential(layer)
    replace_bn_with_hbn(model)
    return model[0]


def _eps() -> float:
    return float(_replaced(nn.BatchNorm2d(3, eps=1e-3)).eps)  # type: ignore[arg-type]


def _kinds() -> str:
    return ", ".join(type(_replaced(kind(3))).__name__ for kind in (nn.BatchNorm1d, nn.BatchNorm3d))


def _without_affine() -> str:
    from FedBaseline.models.FedHBN.MyBNtool import HybridBatchNorm

    return _outcome(lambda: HybridBatchNorm(1, affine=False).train()(torch.ones(2, 1, 2, 2)))


def _command() -> str:
    from FedBaseline.options.options import args_parser  # type: ignore[import-not-found]

    argv, sys.argv = sys.argv, ["FedHBN_main.py", "--iid", "False"]
    try:
        with contextlib.redirect_stderr(io.StringIO()) as told:
            return _outcome(args_parser) + f": {told.getvalue().strip().splitlines()[-1].split('error: ')[-1]}"
    finally:
        sys.argv = argv


def _outcome(call: Callable[[], Any]) -> str:
    try:
        call()
    except (Exception, SystemExit) as error:  # whatever it is, it is the finding
        return f"ends with exit code {error.code}" if isinstance(error, SystemExit) else f"{type(error).__name__}"
    return "runs"


if __name__ == "__main__":
    typer.run(main)
