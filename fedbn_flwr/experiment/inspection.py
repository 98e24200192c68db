"""Predict what a strategy does with a model: shared, kept and frozen parts; floats, bytes and exchanges per round."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.batchnorm.parts import Part, Parts, learning_parts, split_state
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.experiment.config import Config
from fedbn_flwr.experiment.setup import partly_without_effect
from fedbn_flwr.experiment.start_checks import misfits
from fedbn_flwr.messages.records import num_bytes, to_record, to_state
from fedbn_flwr.server.report import Traffic
from fedbn_flwr.server.shared_bn import SHARED_BN
from fedbn_flwr.strategies.fixbn import FreezePlan, Freezing, freeze_round
from fedbn_flwr.training.freezing import holds_eval
from fedbn_flwr.training.modes import kept_modes

__all__ = ["Inspection", "Phase", "batchnorm_calls", "inspect_model"]


@dataclass(frozen=True)
class Phase:
    """Consecutive rounds with equal traffic.

    Attributes:
        name: the name of the phase.
        rounds: number of rounds; None = found out during the run.
        traffic: traffic of each round.
        frozen: the parts that do not change (they are sent all the same).
    """

    name: str
    rounds: int | None
    traffic: Traffic
    frozen: frozenset[Part] = frozenset()


@dataclass(frozen=True)
class Inspection:
    """The predicted cost of a strategy on a model.

    Attributes:
        parts: the split of the model's state.
        floats: number of elements of floating entries by part.
        counters: number of elements of integer entries by part.
        local: the parts that stay with the clients.
        synchronised: the channels of each BatchNorm call in a synchronised step, in order; empty without such a step.
        phases: the phases of the run in order.
        reestimation: additional traffic of re-estimated BN statistics in each round with a test; None without.
        plain: traffic of a round of FedAvg with the same model.
        warnings: why the method would have no effect, or only a part of it.
        frozen: the parameters that do not train (``train-only``); they are sent all the same.
        fixed: the BN layers whose running statistics do not move either (``frozen-bn=eval``).
    """

    parts: Parts
    floats: Mapping[Part, int]
    counters: Mapping[Part, int]
    local: frozenset[Part]
    synchronised: tuple[int, ...]
    phases: tuple[Phase, ...]
    reestimation: Phase | None
    plain: Traffic
    warnings: tuple[str, ...]
    frozen: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()

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
        for phase in (*self.phases, *filter(None, [self.reestimation])):
            if phase.rounds is None:
                raise ConfigError(f"the number of rounds of phase {phase.name!r} is found out during the run")
            total = total.plus(phase.traffic, phase.rounds)
        return total


def inspect_model(model: nn.Module, strategy: str, num_clients: int, config: Config | None = None) -> Inspection:
    """Return the predicted traffic of ``strategy`` between the server and ``num_clients`` clients of a round.

    Args:
        model: the model; one forward pass in eval mode finds the BatchNorm calls of a synchronised step.
        strategy: a key of ``STRATEGIES``.
        num_clients: clients of a round.
        config: gives the number of rounds, the model's input and the method's settings; None = all defaults.

    Raises:
        KeyError: the strategy is not in ``STRATEGIES``.
    """
    config = (config or Config.make({})).model_copy(update={"strategy": strategy})
    method, params = config.method(), config.params()
    parts = split_state(model)
    state = to_state(model.state_dict())
    floats, counters = dict.fromkeys(Part, 0), dict.fromkeys(Part, 0)
    for name, array in state.items():
        numbers = floats if np.issubdtype(array.dtype, np.inexact) else counters
        numbers[parts.part_of[name]] += array.size
    everything = num_bytes(to_record(state))
    shared = num_bytes(to_record({name: a for name, a in state.items() if parts.part_of[name] not in method.local}))

    def one_round(down: tuple[int, int], up: tuple[int, int]) -> Traffic:
        return Traffic(1, down[0], num_clients * up[0], down[1], num_clients * up[1])

    plain, start, later = one_round(everything, everything), one_round(everything, shared), one_round(shared, shared)
    # Further records (variates, momentum) start at zero and are not sent down in the first round.
    extra = method.extra_copies(params) * sum(
        p.numel() * p.element_size()
        for name, p in model.named_parameters(remove_duplicate=False)  # as the state dict: tied weights have two names
        if p.requires_grad and parts.part_of[name] not in method.local
    )
    start.up += num_clients * extra
    later.up += num_clients * extra
    later.down += extra
    learning = learning_parts(model)
    layers, statistics = len(list(learning.moments())), sum(state[name].nbytes for name in learning.statistics)
    rows_down, rows_up = method.extra_statistics(params)
    later.down += int(rows_down * statistics)
    for traffic in (start, later):
        traffic.up += num_clients * int(rows_up * statistics)
        traffic.counters_up += num_clients * 8 * layers * (rows_up > 0)
    if SHARED_BN in config.evaluations():
        for traffic in (start, later):
            traffic.up += num_clients * (everything[0] - shared[0])
            traffic.counters_up += num_clients * (everything[1] - shared[1])
    calls = batchnorm_calls(model, config) if method.synchronises else ()
    costs = [(channels, *method.exchange_cost(params, gradient)) for channels, gradient in calls]
    width = next(model.parameters()).element_size() if costs else 0
    size = width * sum(channels * rows for channels, _, rows in costs)
    exchanges = Traffic(sum(number for _, number, _ in costs), size, num_clients * size)
    plan = method.freeze_plan(params) if issubclass(method, Freezing) else None
    phases = _phases(start, later, exchanges if method.synchronises else None, config.num_server_rounds, plan)
    reestimation = None
    if config.reestimates() and layers:
        tested = -(-config.num_server_rounds // config.eval_every)
        reestimation = Phase("re-estimation", tested, one_round(shared, (statistics, 8 * layers)))
    refused = [f"{need}; the model has {has or 'none'}: a run is refused" for need, has, _ in misfits(config, model)]
    warnings = (*refused, *partly_without_effect(parts, method), *config.warnings(), *_uncounted(config))
    channels = tuple(number for number, _ in calls)
    frozen = tuple(name for name, p in model.named_parameters() if not p.requires_grad)
    fixed = tuple(path for path, module in model.named_modules() if holds_eval(module))
    return Inspection(
        parts, floats, counters, method.local, channels, phases, reestimation, plain, warnings, frozen, fixed
    )


def _uncounted(config: Config) -> Iterator[str]:
    """Yield what a run with these settings sends beyond the traffic of ``inspect_model``."""
    if config.masked_sums:
        yield "masked-sums: its further exchanges, and the 64 bits of each masked float, are not counted here"
    if config.fraction_train < 1 and config.method().local:
        yield "fraction-train: a client first asked after round 1 gets the whole model, which is not counted here"


def _phases(
    start: Traffic,
    later: Traffic,
    exchanges: Traffic | None,
    rounds: int,
    plan: FreezePlan | None,
) -> tuple[Phase, ...]:
    """Split the rounds into phases.

    Args:
        start: traffic of round 1, without the synchronised step.
        later: traffic of the other rounds.
        exchanges: traffic of the synchronised step, which each round has until BN is frozen; None = no such step.
        rounds: rounds of the run.
        plan: when and what is frozen; None = BN is never frozen.
    """
    last = rounds if plan is None else freeze_round(plan.at, rounds)
    parts = frozenset() if plan is None else plan.parts
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
            name = "before T*" if plan else "every"
        found.append(Phase(name, end - begin, traffic, parts if frozen else frozenset()))
    if last is None:
        found = [*found[:-1], dataclasses.replace(found[-1], rounds=None), Phase("frozen", None, later, parts)]
    return tuple(found)


def batchnorm_calls(model: nn.Module, config: Config) -> tuple[tuple[int, bool], ...]:
    """Return the BatchNorm calls of a forward pass, in order: channels, and whether the input needs a gradient.

    A layer called twice counts twice; layers that are kept in eval mode are left out.
    """
    parameter = next(model.parameters())
    found: list[tuple[int, bool]] = []

    def note(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        found.append((args[0].shape[1], args[0].requires_grad))

    layers = [module for module in model.modules() if isinstance(module, _BatchNorm) and not holds_eval(module)]
    handles = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        with kept_modes(model), torch.enable_grad():
            model.eval()(torch.zeros(2, *config.example_shape(), dtype=parameter.dtype, device=parameter.device))
    finally:
        for handle in handles:
            handle.remove()
    return tuple(found)
