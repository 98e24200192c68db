"""Predict the effect of a strategy on a model, without a run.

The prediction has shared, kept and frozen parts, and floats, bytes and exchanges per
round.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from fedbn_flwr.batchnorm.parts import Part, Parts
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import Config, data_of, method_of
from fedbn_flwr.lab.runs.check_start import misfits
from fedbn_flwr.lab.setup import partly_without_effect
from fedbn_flwr.messages.records import Traffic, num_bytes, to_record, to_state
from fedbn_flwr.server.methods.shared_bn import SHARED_BN
from fedbn_flwr.server.methods.together import Methods
from fedbn_flwr.training.batches import inputs_for
from fedbn_flwr.training.freezing import layers_of, stays_in_eval
from fedbn_flwr.training.modes import restored_modes


@dataclass(frozen=True)
class Phase:
    """Consecutive rounds with equal traffic.

    Attributes:
        name: the name of the phase.
        rounds: number of rounds; None if it is unknown before the run.
        traffic: traffic of each round.
        frozen: the parts that do not change, although they are sent.
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
        sizes: number of elements of each entry.
        floats: number of elements of floating entries by part.
        counters: number of elements of integer entries by part.
        local: the parts that stay with the clients.
        synchronised: the channels of each BatchNorm call in a synchronised step, in
            order; empty without such a step.
        phases: the phases of the run in order.
        reestimation: additional traffic of re-estimated BN statistics in each round
            with a test; None without re-estimation.
        plain: traffic of a round of FedAvg with the same model.
        warnings: reasons why the method has no effect, or only part of its effect.
        frozen: the parameters that do not train (``train-only``), although they are
            sent.
        fixed: the BN layers with fixed running statistics, because of
            ``frozen-bn=eval``, or because a user's model has them in eval mode.
    """

    parts: Parts
    sizes: Mapping[str, int]
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
            ConfigError: the length of a phase is unknown before the run.
        """
        phases = list(self.phases)
        if self.reestimation:
            phases.append(self.reestimation)
        total = Traffic()
        for phase in phases:
            if phase.rounds is None:
                raise ConfigError(
                    f"only the run determines the number of rounds of phase"
                    f" {phase.name!r}"
                )
            total = total.plus(phase.traffic, phase.rounds)
        return total


def inspect_model(
    model: nn.Module, strategy: str, num_clients: int, config: Config | None = None
) -> Inspection:
    """Return the predicted traffic of ``strategy`` on a model.

    Args:
        model: the model; one forward pass in eval mode finds the BatchNorm calls of a
            synchronised step.
        strategy: a key of ``STRATEGIES``.
        num_clients: clients of a round.
        config: number of rounds, the model's input and the method's settings; None for
            all defaults.

    Raises:
        KeyError: the strategy is not in ``STRATEGIES``.
    """
    if config is None:
        config = Config.make({})
    config = config.model_copy(update={"strategy": strategy})
    methods = method_of(config).methods

    # Compute the costs of a round and of its synchronised step.
    costs = _Costs(model, config, num_clients)
    start, later = costs.rounds()
    calls: tuple[tuple[int, bool], ...] = ()
    step = None
    if methods.whole.exchanges:
        calls = batchnorm_calls(model, config)
        step = costs.synchronised_step(calls, model)

    # Collect warnings about unexpected behaviour.
    warnings = []
    for fit in misfits(config, model):
        warnings.append(f"{fit} A run is refused.")
    warnings += partly_without_effect(costs.parts, methods)
    warnings += config.warnings()
    warnings += _uncounted(config)

    in_eval = stays_in_eval(model)
    return Inspection(
        parts=costs.parts,
        sizes=costs.sizes,
        floats=costs.elements(floating=True),
        counters=costs.elements(floating=False),
        local=methods.local,
        synchronised=tuple(channels for channels, _ in calls),
        phases=_phases(start, later, step, config.num_server_rounds, methods),
        reestimation=costs.reestimation(),
        plain=costs.one_round(costs.everything, costs.everything),
        warnings=tuple(warnings),
        frozen=tuple(
            name for name, p in model.named_parameters() if not p.requires_grad
        ),
        fixed=tuple(
            path for path, module in model.named_modules() if module in in_eval
        ),
    )


Sizes = tuple[int, int]  # numbers of floats and of counters


class _Costs:
    """Computes the traffic of a method on a model with a given number of clients.

    Attributes:
        parts: the split of the model's state.
        sizes: the number of elements of each entry.
        everything: the bytes of the whole state.
        shared: the bytes of the state without the clients' local parts.
    """

    def __init__(self, model: nn.Module, config: Config, num_clients: int) -> None:
        self._config = config
        self._num_clients = num_clients
        self._travels = method_of(config).methods.whole

        # the bytes of the whole state, and of the entries that do not stay with the
        # clients
        self.parts = method_of(config).parts(model)
        self._state = to_state(model.state_dict())
        self.sizes = {name: array.size for name, array in self._state.items()}
        self.everything = num_bytes(to_record(self._state))
        sent = {name: a for name, a in self._state.items() if self._sends(name)}
        self.shared = num_bytes(to_record(sent))

        # the bytes of the parameters that train; a tied weight counts once for each of
        # its names, as in the state dict
        self._trained = 0
        for name, p in model.named_parameters(remove_duplicate=False):
            if p.requires_grad and self._sends(name):
                self._trained += p.numel() * p.element_size()

        # the number of BN layers whose statistics move, and the bytes of these
        # statistics
        learning = method_of(config).parts(model, learning=True)
        tracking = [one for one in learning.layers if "running_mean" in one.entries]
        self._layers = len(tracking)
        self._statistics = sum(self._state[name].nbytes for name in learning.statistics)

    def _sends(self, name: str) -> bool:
        return self.parts.part_of[name] not in self._travels.local

    def elements(self, *, floating: bool) -> dict[Part, int]:
        """Return the number of elements of floating or of integer entries by part."""
        numbers = dict.fromkeys(Part, 0)
        for name, array in self._state.items():
            if np.issubdtype(array.dtype, np.inexact) == floating:
                numbers[self.parts.part_of[name]] += array.size
        return numbers

    def one_round(self, down: Sizes, up: Sizes) -> Traffic:
        """Return the traffic of one message to each client and one reply from each."""
        clients = self._num_clients
        return Traffic(1, down[0], clients * up[0], down[1], clients * up[1])

    def rounds(self) -> tuple[Traffic, Traffic]:
        """Return the traffic of round 1, and the traffic of a later round.

        Synchronised steps are not included.
        """
        # The first round also sends the parts that stay with the clients.
        start = self.one_round(self.everything, self.shared)
        later = self.one_round(self.shared, self.shared)

        # Further records, such as variates and momentum, are 0 at the start, so the
        # first round does not send them to the clients.
        copies_down, copies_up = self._travels.extra_copies
        more_down = copies_down * self._trained
        more_up = copies_up * self._trained
        counts_up = 0

        # For a test with averaged BN, the clients also send the parts that they keep.
        if SHARED_BN in method_of(self._config).tests:
            more_up += self.everything[0] - self.shared[0]
            counts_up += self.everything[1] - self.shared[1]

        later.down += more_down
        for traffic in (start, later):
            traffic.up += self._num_clients * more_up
            traffic.counters_up += self._num_clients * counts_up
        return start, later

    def synchronised_step(
        self, calls: Sequence[tuple[int, bool]], model: nn.Module
    ) -> Traffic:
        """Return the traffic of a synchronised step with these BatchNorm calls."""
        exchanges = self._travels.exchanges
        if exchanges is None or not calls:
            return Traffic()
        # Add the exchanges of each call of a BN layer. Each row of an exchange has a
        # value for each channel.
        number, values = 0, 0
        for channels, gradient in calls:
            exchanged, rows = exchanges.cost(gradient)
            number += exchanged
            values += channels * rows
        width = inputs_for(model)(torch.zeros(1)).element_size()
        size = width * values
        apart = width * exchanges.apart * len(calls)
        clients = self._num_clients
        return Traffic(number, size, clients * size, apart, clients * apart)

    def reestimation(self) -> Phase | None:
        """Return the traffic that re-estimated statistics add in each tested round.

        It is None if the method re-estimates nothing, or no BN layer tracks statistics.
        """
        if not method_of(self._config).reestimates or not self._layers:
            return None
        # Round up, because the last round always has a test.
        tested = -(-self._config.num_server_rounds // self._config.eval_every)
        moments = (self._statistics, 8 * self._layers)
        return Phase("re-estimation", tested, self.one_round(self.shared, moments))


def _uncounted(config: Config) -> Iterator[str]:
    """Yield texts on traffic that ``inspect_model`` does not count."""
    if config.fraction_train < 1 and method_of(config).methods.local:
        yield (
            "fraction-train: a client gets the whole model if it is first asked after"
            " round 1. This is not counted here"
        )


def _phases(
    start: Traffic,
    later: Traffic,
    exchanges: Traffic | None,
    rounds: int,
    methods: Methods,
) -> tuple[Phase, ...]:
    """Split the rounds into phases.

    Args:
        start: traffic of round 1, without the synchronised step.
        later: traffic of the other rounds.
        exchanges: traffic of the synchronised step in each round until BN is frozen;
            None without such a step.
        rounds: rounds of the run.
        methods: the methods of the run.
    """
    # the last round before BN is frozen; None if the run itself determines it
    last: int | None = rounds
    parts: frozenset[Part] = frozenset()
    if methods.freezes_bn:
        declared = methods.phases(rounds)
        last = [one.last for one in declared if not one.frozen][-1]
        parts = declared[-1].frozen

    # Collect the rounds after which the traffic changes.
    cuts = {0, rounds}
    if start != later:
        cuts.add(1)
    if last is not None:
        cuts.add(min(last, rounds))

    phases = []
    for begin, end in itertools.pairwise(sorted(cuts)):
        traffic = start if begin == 0 else later
        if last is not None and begin >= last:
            phases.append(Phase("frozen", end - begin, traffic, parts))
            continue
        if exchanges is not None:
            name, traffic = "synchronised", traffic.plus(exchanges)
        elif start != later:
            name = "first" if begin == 0 else "later"
        else:
            name = "before T*" if parts else "every"
        phases.append(Phase(name, end - begin, traffic))

    # If the run itself determines the last round, the length of both phases is unknown.
    if last is None:
        phases[-1] = dataclasses.replace(phases[-1], rounds=None)
        phases.append(Phase("frozen", None, later, parts))
    return tuple(phases)


def batchnorm_calls(model: nn.Module, config: Config) -> tuple[tuple[int, bool], ...]:
    """Return the BatchNorm calls of a forward pass, in their order.

    For each call, return the number of channels, and whether the input needs a
    gradient. A layer that is called twice has two calls. Layers that stay in eval mode
    are left out.
    """
    calls: list[tuple[int, bool]] = []

    def note(
        _: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]
    ) -> None:
        x = args[0] if args else kwargs["input"]
        calls.append((x.shape[1], x.requires_grad))

    # Leave out layers that normalise with running statistics, because a synchronised
    # step leaves them out as well.
    in_eval = stays_in_eval(model)
    handles = []
    for layer in layers_of(model).values():
        if layer not in in_eval:
            hook = layer.register_forward_pre_hook(note, with_kwargs=True)
            handles.append(hook)

    # Run the model in eval mode, so that its statistics do not move.
    shape = (2, *data_of(config).shape)
    inputs = inputs_for(model)(torch.zeros(shape))
    try:
        with restored_modes(model), torch.enable_grad():
            model.eval()(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(calls)
