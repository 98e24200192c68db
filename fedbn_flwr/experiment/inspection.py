"""What a strategy does with a model, foretold: shared, kept and frozen parts, floats, bytes and exchanges per round."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.batchnorm.parts import Part, Parts, split_state
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.experiment.config import Config
from fedbn_flwr.experiment.setup import image_shape
from fedbn_flwr.messages.records import to_state
from fedbn_flwr.server.report import Traffic
from fedbn_flwr.server.shared_bn import SHARED_BN
from fedbn_flwr.strategies import STRATEGIES
from fedbn_flwr.strategies.fixbn import At, Freezing, freeze_round
from fedbn_flwr.training.loop import kept_modes

__all__ = ["Inspection", "Phase", "batchnorm_calls", "inspect_model"]


@dataclass(frozen=True)
class Phase:
    """A stretch of equal rounds.

    Attributes:
        name: what distinguishes it.
        rounds: how many; None = found out during the run.
        traffic: of each round.
        frozen: the parts that do not change in it (they travel all the same).
    """

    name: str
    rounds: int | None
    traffic: Traffic
    frozen: frozenset[Part] = frozenset()


@dataclass(frozen=True)
class Inspection:
    """The foreseen cost of a strategy on a model.

    Attributes:
        parts: the split of the model's state.
        floats: number of floating entries' elements by part.
        counters: number of elements of integer entries by part.
        local: the parts that stay with the clients.
        synchronised: the channels of each BatchNorm call that a synchronised step meets, in order; empty elsewhere.
        phases: the run's rounds in order.
        gathering: what gathering BN statistics adds in each round with a test; None where the method does not.
        plain: traffic of a round of FedAvg with the same model.
        warnings: where the method would do nothing, or part of it.
    """

    parts: Parts
    floats: Mapping[Part, int]
    counters: Mapping[Part, int]
    local: frozenset[Part]
    synchronised: tuple[int, ...]
    phases: tuple[Phase, ...]
    gathering: Phase | None
    plain: Traffic
    warnings: tuple[str, ...]

    @property
    def first(self) -> Traffic:
        """Traffic of the first round."""
        return self.phases[0].traffic

    @property
    def later(self) -> Traffic:
        """Traffic of the last round."""
        return self.phases[-1].traffic

    def total(self) -> Traffic:
        """Return the traffic of the whole run.

        Raises:
            ConfigError: the length of a phase is found out during the run.
        """
        total = Traffic()
        for phase in (*self.phases, *filter(None, [self.gathering])):
            if phase.rounds is None:
                raise ConfigError(f"the number of rounds of phase {phase.name!r} is found out during the run")
            total = total.plus(phase.traffic, phase.rounds)
        return total


def inspect_model(model: nn.Module, strategy: str, num_clients: int, config: Config | None = None) -> Inspection:
    """Foretell what ``strategy`` moves per training round between the server and ``num_clients`` clients.

    Args:
        model: the model; one forward pass in eval mode finds out which BatchNorm calls a synchronised step meets.
        strategy: a key of ``STRATEGIES``.
        num_clients: clients of a round.
        config: for the number of rounds, the model's input and the method's settings; default: the defaults.

    Raises:
        KeyError: the strategy is not in ``STRATEGIES``.
    """
    config = (config or Config.make({})).model_copy(update={"strategy": strategy})
    method, params = STRATEGIES[strategy], config.params()
    parts = split_state(model)
    floats, counters = dict.fromkeys(Part, 0), dict.fromkeys(Part, 0)
    shared, everything = [0, 0], [0, 0]
    for name, array in to_state(model.state_dict()).items():
        part = parts.part_of[name]
        is_float = bool(np.issubdtype(array.dtype, np.inexact))
        (floats if is_float else counters)[part] += array.size
        kind = 0 if is_float else 1
        everything[kind] += array.nbytes
        if part not in method.local:
            shared[kind] += array.nbytes
    plain = Traffic(1, everything[0], num_clients * everything[0], everything[1], num_clients * everything[1])
    start = Traffic(1, everything[0], num_clients * shared[0], everything[1], num_clients * shared[1])
    later = Traffic(1, shared[0], num_clients * shared[0], shared[1], num_clients * shared[1])
    # What accompanies the model (variates, momentum) starts at zero and is not sent down in the first round.
    shared_copies, all_copies = method.extra_copies(params)
    extra = sum(
        p.numel() * p.element_size() * (all_copies + shared_copies * (parts.part_of[name] not in method.local))
        for name, p in model.named_parameters()
        if p.requires_grad
    )
    start.up += num_clients * extra
    later.up += num_clients * extra
    later.down += extra
    if SHARED_BN in config.evaluations():
        for traffic in (start, later):
            traffic.up += num_clients * (everything[0] - shared[0])
            traffic.counters_up += num_clients * (everything[1] - shared[1])
    per_layer, rows = method.exchange_cost(params)
    calls = batchnorm_calls(model, config) if method.synchronises else ()
    size = next(model.parameters()).element_size() * rows * sum(calls) if calls else 0
    exchanges = Traffic(per_layer * len(calls), size, num_clients * size)
    freezes = method.freezes(params) if issubclass(method, Freezing) else None
    phases = _phases(start, later, exchanges if method.synchronises else None, config.num_server_rounds, freezes)
    gathering = None
    if (method.reestimates or config.recalibrate) and (layers := len(list(parts.moments()))):
        tested = -(-config.num_server_rounds // config.eval_every)
        up = sum(array.nbytes for name, array in to_state(model.state_dict()).items() if name in parts.statistics)
        moved = Traffic(1, later.down - extra, num_clients * up, later.counters_down, num_clients * 8 * layers)
        gathering = Phase("gathering", tested, moved)
    warnings = _warnings(parts, strategy)
    return Inspection(parts, floats, counters, method.local, calls, phases, gathering, plain, warnings)


def _phases(
    start: Traffic, later: Traffic, exchanges: Traffic | None, rounds: int, freezes: tuple[str, At, bool] | None
) -> tuple[Phase, ...]:
    """Cut the rounds into stretches of equal ones.

    Args:
        start: traffic of round 1, without the synchronised step.
        later: of the other rounds.
        exchanges: of a synchronised step, which is taken until BN is frozen; None where the method has none.
        rounds: of the run.
        freezes: see ``Freezing.freezes``; None = never.
    """
    _, at, affine = freezes or ("", rounds, False)
    last = freeze_round(at, rounds)
    parts = frozenset({Part.STATISTICS, Part.COUNTERS} | ({Part.AFFINE} if affine else set()))
    cuts = {0, rounds, 1 if start != later else 0, rounds if last is None else min(last, rounds)}
    found = []
    for begin, end in itertools.pairwise(sorted(cuts)):
        traffic = start if begin == 0 else later
        if frozen := last is not None and begin >= last:
            name = "frozen"
        elif exchanges is not None:
            name, traffic = "synchronised", traffic.plus(exchanges)
        elif start != later:
            name = "first" if begin == 0 else "later"
        else:
            name = "before T*" if freezes else "every"
        found.append(Phase(name, end - begin, traffic, parts if frozen else frozenset()))
    if last is None:
        found = [*found[:-1], dataclasses.replace(found[-1], rounds=None), Phase("frozen", None, later, parts)]
    return tuple(found)


def batchnorm_calls(model: nn.Module, config: Config) -> tuple[int, ...]:
    """Return the channels of each BatchNorm call of a forward pass, in order: a layer used twice stands twice."""
    parameter = next(model.parameters())
    found: list[int] = []

    def note(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        found.append(args[0].shape[1])

    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    handles = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        with kept_modes(model), torch.no_grad():
            model.eval()(torch.zeros(2, *image_shape(config), dtype=parameter.dtype, device=parameter.device))
    finally:
        for handle in handles:
            handle.remove()
    return tuple(found)


def _warnings(parts: Parts, strategy: str) -> tuple[str, ...]:
    method = STRATEGIES[strategy]
    found = []
    if not parts.layers and method.needs_batchnorm:
        found.append(f"the model has no BatchNorm: {strategy} would do what fedavg does")
    no_affine = [layer.path for layer in parts.layers if "weight" not in layer.entries]
    if no_affine and Part.AFFINE in method.local:
        found.append(f"{len(no_affine)} BN layer(s) have no gamma and beta to keep: {', '.join(no_affine[:3])}")
    no_statistics = [layer.path for layer in parts.layers if "running_mean" not in layer.entries]
    if no_statistics:
        found.append(
            f"{len(no_statistics)} BN layer(s) track no running statistics and use the batch's own in testing: "
            + ", ".join(no_statistics[:3])
        )
    return tuple(found)
