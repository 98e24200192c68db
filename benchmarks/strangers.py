"""Models of other packages under four methods: does a run equal plain torch, or is it
refused in words?

    python benchmarks/strangers.py                          # 40 models in five ways; hours on one core
    python benchmarks/strangers.py --models 5 --way plain   # the five smallest, as they come; a minute
    python benchmarks/strangers.py --only resnet18

The models are the smallest of torchvision, and of timm where it is importable, that
have BatchNorm. Each runs as it comes (`plain`), with its BatchNorm in eval mode
(`eval`), with the names of DataParallel (`wrapped`), compiled (`compiled`; the first
three with Inductor, too), and with the old weight_norm on one layer (`weight-norm`). A
run has two rounds of one step on batches of 4 images, with three clients, in float64.
Dropout and stochastic depth are off, so that there is something to compare with: the
same rounds written out in plain torch.

A line for each model, way and method: `equal` with the largest relative difference,
`refused` with the sentence, or `WRONG` or `TRACEBACK`, with which the exit code is 1.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Annotated, NamedTuple

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

import torch
import torchvision
import typer
from flwr.app import Context
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import TensorDataset

from fedbn_flwr import InProcessGrid, TorchClient, client_app, split_state
from fedbn_flwr.errors import FedBNError
from fedbn_flwr.messages.records import from_record, tensors, to_record
from fedbn_flwr.strategies import FedAvg, FedBN, FedTAN, FixBN, Strategy
from fedbn_flwr.training import LearningRate, LocalTraining

CLIENTS, BATCH, CLASSES, ROUNDS, RATE = 3, 4, 5, 2, 0.01
TOLERANCE = 1e-6
METHODS: dict[str, Callable[[], Strategy]] = {
    "fedavg": FedAvg,
    "fedbn": FedBN,
    "fixbn": lambda: FixBN(freeze_at=1),
    "fedtan": FedTAN,
}
WAYS = ("plain", "eval", "wrapped", "compiled", "inductor", "weight-norm")
NUM_INDUCTOR = 3
_OF_TIMM = (
    "test_byobnet test_efficientnet test_resnet lcnet_035 lcnet_050"
    " mobilenetv3_small_050 mobilenetv3_small_075 tinynet_e mobilenetv2_035"
    " mnasnet_small semnasnet_050 regnetx_002 regnety_002 ghostnet_050 repghostnet_050"
    " mobilenetv4_conv_small_035 dla46x_c dla46_c efficientvit_m0 starnet_s050"
    " levit_128s resnet10t hardcorenas_a spnasnet_100 fbnetc_100 mobileone_s0"
)
TIMM = tuple(_OF_TIMM.split())
"""Small networks of timm with BatchNorm; to build all of timm takes longer than to run
these.
"""

Build = Callable[[], nn.Module]
State = dict[str, Tensor]


class Line(NamedTuple):
    """The outcome of a run: "equal", "refused", "WRONG" or "TRACEBACK", and a number or
    a sentence.
    """

    verdict: str
    what: str


def strangers(number: int = 40) -> list[str]:
    """Return the names of the smallest models, as ``torchvision:NAME`` and
    ``timm:NAME``.
    """
    names = [
        f"torchvision:{name}"
        for name in torchvision.models.list_models(module=torchvision.models)
    ]
    if importlib.util.find_spec("timm"):
        names += [f"timm:{name}" for name in TIMM]
    sizes = {name: size for name in names if (size := _size(name))}
    return sorted(sizes, key=sizes.__getitem__)[:number]


def _size(name: str) -> int:
    """Return the number of a model's parameters; 0 if it has no BatchNorm or cannot be
    built for a few classes.
    """
    try:
        with torch.device("meta"):
            model = _made(name)
    except Exception:
        return 0
    has_norm = any(isinstance(module, _BatchNorm) for module in model.modules())
    return sum(p.numel() for p in model.parameters()) if has_norm else 0


def _made(name: str) -> nn.Module:
    publisher, _, kind = name.partition(":")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if publisher == "timm":
            import timm

            return timm.create_model(kind, num_classes=CLASSES)
        return torchvision.models.get_model(kind, num_classes=CLASSES)  # type: ignore[no-any-return]


def built(name: str, way: str) -> nn.Module:
    """Return a model in float64, without a wrapper and without what is drawn at random
    in training.
    """
    torch.manual_seed(0)
    model = _made(name).double()
    for module in model.modules():
        for leaf in ("p", "drop_prob", "drop_rate"):
            if isinstance(vars(module).get(leaf), float):
                setattr(module, leaf, 0.0)
    if way == "weight-norm":
        layer = next(
            m
            for m in reversed(list(model.modules()))
            if isinstance(m, (nn.Conv2d, nn.Linear))
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ``weight_norm`` is deprecated
            nn.utils.weight_norm(layer)
    if way == "eval":
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
    return model


def _dressed(model: nn.Module, way: str) -> nn.Module:
    """Return the model as the clients have it."""
    if way == "wrapped":
        return nn.DataParallel(model)
    if way in ("compiled", "inductor"):
        return torch.compile(
            model, backend="eager" if way == "compiled" else "inductor"
        )  # type: ignore[return-value]
    return model


def batches(size: int) -> list[tuple[Tensor, Tensor]]:
    """Return a batch of each client."""
    draw = torch.Generator().manual_seed(1)
    shape = (BATCH, 3, size, size)
    return [
        (
            torch.randn(shape, generator=draw, dtype=torch.float64) + k,
            torch.randint(CLASSES, (BATCH,), generator=draw),
        )
        for k in range(CLIENTS)
    ]


def by_this_package(name: str, way: str, method: str, size: int) -> State:
    """Return the final state under the names of the bare model."""
    data = [TensorDataset(*batch) for batch in batches(size)]
    settings = LocalTraining(
        learning_rate=LearningRate(RATE), batch_size=0, local_steps=1
    )

    def client_fn(context: Context) -> TorchClient:
        mine = data[int(context.node_config["partition-id"])]
        return TorchClient(
            lambda: _dressed(built(name, way), way),
            mine,
            mine,
            settings,
            context=context,
        )

    start = built(name, way)
    sent = nn.DataParallel(start) if way == "wrapped" else start
    strategy = METHODS[method]()
    strategy.parts = split_state(sent)
    with InProcessGrid(client_app(client_fn), num_nodes=CLIENTS) as grid:
        arrays = to_record(sent.state_dict())
        result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=ROUNDS)
    return {
        name.removeprefix("module."): value
        for name, value in tensors(from_record(result.arrays)).items()
    }


def by_torch(name: str, way: str, method: str, size: int) -> State:
    """Return the final state of the same rounds in plain torch; under FedBN without the
    parts that clients keep.
    """
    data = batches(size)
    model = built(name, way)
    state = _copied(model)
    norm = {
        entry for layer in split_state(model).layers for entry in layer.entries.values()
    }
    kept: list[State] = [{} for _ in data]
    for number in range(ROUNDS):
        if method == "fedtan":  # a step on the union of the batches
            union = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
            state = _step(model, state, union, way == "eval")
            continue
        frozen = way == "eval" or (method == "fixbn" and number > 0)
        states = [
            _step(model, {**state, **own}, batch, frozen)
            for own, batch in zip(kept, data, strict=True)
        ]
        if method == "fedbn":
            kept = [{entry: one[entry] for entry in norm} for one in states]
        state = {
            entry: torch.stack([one[entry] for one in states]).sum(0) / CLIENTS
            for entry in state
        }
    return {
        entry: value
        for entry, value in state.items()
        if not (method == "fedbn" and entry in norm)
    }


def _copied(model: nn.Module) -> State:
    return {entry: value.clone() for entry, value in model.state_dict().items()}


def _step(
    model: nn.Module, state: State, batch: tuple[Tensor, Tensor], frozen: bool
) -> State:
    whole = model.state_dict()  # with layers' versions, which some layers need to load
    whole.update(state)
    model.load_state_dict(whole)
    model.train()
    for module in model.modules():
        if frozen and isinstance(module, _BatchNorm):
            module.eval()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    optimizer.zero_grad()
    functional.cross_entropy(model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return _copied(model)


def compared(name: str, way: str, method: str, size: int = 64) -> Line:
    """Return the outcome of a model in a way under a method."""
    try:
        wanted = by_torch(name, way, method, size)
    except Exception as error:  # the model takes no such images or outputs
        wanted, failure = {}, f"torch itself raises {type(error).__name__}: {error}"
    try:
        found = by_this_package(name, way, method, size)
    except FedBNError as error:
        return Line(
            "refused", f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        )
    except Exception as error:
        return Line(
            "TRACEBACK", f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        )
    if not wanted:
        return Line("refused", failure)
    floats = [entry for entry, value in wanted.items() if value.is_floating_point()]
    if missing := [entry for entry in floats if entry not in found]:
        return Line("WRONG", f"no entry '{missing[0]}'")
    apart = {entry: _difference(found[entry], wanted[entry]) for entry in floats}
    worst = max(apart, key=apart.__getitem__)
    text = f"{apart[worst]:.1e} ({worst})"
    return Line("equal" if apart[worst] <= TOLERANCE else "WRONG", text)


def _difference(found: Tensor, wanted: Tensor) -> float:
    if not torch.isfinite(found).all():
        return float("inf")
    return (
        float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-3))
        if wanted.numel()
        else 0.0
    )


def lines(
    names: list[str], ways: list[str], size: int
) -> Iterator[tuple[str, str, str, Line]]:
    """Yield the outcome of every model, way and method."""
    for index, name in enumerate(names):
        for way in ways:
            if way == "inductor" and index >= NUM_INDUCTOR:
                continue
            for method in METHODS:
                yield name, way, method, compared(name, way, method, size)


def main(
    models: Annotated[
        int, typer.Option(help="Number of models, the smallest first.")
    ] = 40,
    way: Annotated[
        list[str] | None, typer.Option(help="One of the ways; all by default.")
    ] = None,
    only: Annotated[
        str, typer.Option(help="Only models with this text in their names.")
    ] = "",
    size: Annotated[int, typer.Option(help="Pixels of an image, 32 to 64.")] = 64,
) -> None:
    """Compare each model with plain torch."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    names = [name for name in strangers(models) if only in name]
    counts: dict[str, int] = {}
    for name, one_way, method, line in lines(names, way or list(WAYS), size):
        counts[line.verdict] = counts.get(line.verdict, 0) + 1
        print(
            f"{name:36} {one_way:12} {method:7} {line.verdict:9} {line.what}",
            flush=True,
        )
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    raise typer.Exit(int(any(verdict.isupper() for verdict in counts)))


if __name__ == "__main__":
    typer.run(main)
