"""The server's part of record-level differential privacy: what a run costs, and what its clients may send.

The clients do the rest (``privacy.record_level``). A round is counted before its messages are sent, as if the smallest
sampled client were every client and took part in every round: this bounds epsilon of each one. A reply must say that
its client trained with DP-SGD, and with at least the noise that is counted; the server cannot know more.

FixBN with T* > 0 has rounds in which BatchNorm normalises with whole batches. There a client trains without DP-SGD, and
client-level noise (``privacy.differential``) protects the models. A removed example may change its client's update to
any other, by up to 2 C: such a round counts as a Gaussian release with the noise multiplier z / 2. Together with the
steps of DP-SGD after T* it gives one epsilon for an example. The server is trusted until T*.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from fedbn_flwr.batchnorm.averaging import State
from fedbn_flwr.errors import ClientPartError, ConfigError
from fedbn_flwr.messages.protocol import FROZEN, merged_config
from fedbn_flwr.privacy.accounting import (
    Steps,
    epsilon_of_steps,
    noise_for_steps,
    note,
    require_dp_accounting,
    restored,
)
from fedbn_flwr.privacy.differential import NO_ROUND, ClientLevelDP, beside_models, refuse_inputs
from fedbn_flwr.privacy.record_level import NOISE, RecordLevel, sampling_rate
from fedbn_flwr.privacy.settings import TWO_NOISES
from fedbn_flwr.server.method import Reply
from fedbn_flwr.server.methods import Methods
from fedbn_flwr.server.nodes import Node
from fedbn_flwr.server.protection import Protection
from fedbn_flwr.server.run import Run
from fedbn_flwr.server.synchronised_step import with_config

__all__ = ["RecordLevelDP", "kept_between_rounds"]

logger = logging.getLogger("flwr")

_LACKS_COUNT = (
    "record-dp: its number of training examples is not known, so what it would cost is not. Its app must answer the "
    "strategies' query (client_app does, or answer_query)."
)


class RecordLevelDP(Protection):
    """The accounting of a run whose clients train with DP-SGD.

    Args:
        settings: those of the clients; with a target epsilon their ``noise_multiplier`` is None.
        steps: local steps of a round.
        batch_size: expected size of a batch; 0 = all examples of a client.
        delta: the probability delta of the guarantee.
        file: a file for the rounds, so that a run which is killed and repeats some counts them twice, as it must.
        until_frozen: the protection of the rounds before BN is frozen, where clients train with ``frozen_only``.
        target_epsilon: the noise is chosen in the first round, for the rounds that are left and the smallest client
            then; a round that would cost more ends the run. 0 = none.
        max_epsilon: the run ends before a round that would cost more in total; 0 = none.

    Attributes:
        noise_multiplier: z; None before the first round, where it comes from a target epsilon.
        releases: the rounds of DP-SGD so far, of all runs with this object.
        always_releases: whether this round has client-level noise.

    Raises:
        ConfigError: settings exclude each other, or the library that computes epsilon is not installed.
    """

    def __init__(
        self,
        settings: RecordLevel,
        steps: int,
        batch_size: int,
        delta: float = 1e-5,
        file: Path | None = None,
        until_frozen: ClientLevelDP | None = None,
        target_epsilon: float = 0.0,
        max_epsilon: float = 0.0,
    ) -> None:
        self.settings, self.delta, self.releases = settings, delta, list[Steps]()
        self._steps, self._batch_size, self._file = steps, batch_size, file
        self.publishes_metrics = settings.publishes_metrics
        self._of_inputs = 0  # releases up to that of the inputs' sums, before round 1
        self._until_frozen, self._target, self._max = until_frozen, target_epsilon, max_epsilon
        self.noise_multiplier, self._spent, self._warned = settings.noise_multiplier, False, False
        if until_frozen:
            until_frozen.tells = False
        if (settings.noise_multiplier is None) != bool(target_epsilon):
            raise ConfigError("record-level privacy: target_epsilon and noise_multiplier=None belong together")
        if target_epsilon and until_frozen:
            raise ConfigError(f"target_epsilon={target_epsilon} {TWO_NOISES}")
        if settings.frozen_only != (until_frozen is not None):
            raise ConfigError("record-level privacy: frozen_only of the clients and until_frozen belong together")
        if settings.noise_multiplier != 0:
            require_dp_accounting()

    @property
    def hides_clients(self) -> bool:
        """See ``Protection``: with client-level noise in some rounds also in the others."""
        return self._until_frozen is not None

    def begin(self, methods: Methods, weighted_by_key: str) -> None:
        """Check that nothing but the clients' models is used.

        Raises:
            ConfigError: the method sends or uses more of a client, or carries data without noise into DP-SGD.
        """
        if self._until_frozen:
            self._until_frozen.begin(methods, weighted_by_key)
        self.noise_multiplier, self._spent, self._warned = self.settings.noise_multiplier, False, False
        self._restore([])
        subject = f"strategy {methods.name!r} with record-dp"
        problems = [f"{subject}: {what}" for what in beside_models(methods)]
        if self._until_frozen:
            problems += [f"{subject} until BN is frozen: {what}" for what in kept_between_rounds(methods)]
        if problems:
            raise ConfigError("\n".join(problems))

    def admits(self, run: Run, asked: int) -> bool:
        """Return whether a round keeps within the budget; choose the noise for a target epsilon.

        Raises:
            ConfigError: not even one round does.
        """
        inner = self._until_frozen if run.report.phase != "frozen" else None
        self._spent = inner is not None and not inner.admits(run, asked)
        if not self._limit or self._spent:
            return not self._spent
        if not inner and not run.smallest:
            return True  # `open_round` says that no client can be counted
        cost = _of_client_noise(inner.noise_multiplier or 0.0) if inner else self._planned(run)
        epsilon = self._cost(cost)
        self._spent = epsilon > self._limit * (1 + 1e-9)
        if self._spent:
            self._tell_spent(run, epsilon)
        return not self._spent

    @property
    def _limit(self) -> float:
        """The largest epsilon of the run; 0 = none."""
        return self._max or self._target

    def _planned(self, run: Run) -> Steps:
        """Return the steps of the smallest client in this round; choose z for a target epsilon that is not spent."""
        rate = sampling_rate(run.smallest, self._batch_size)
        if self.noise_multiplier is None and self._cost() < self._target:
            steps = self._steps * run.rounds_left
            self.noise_multiplier = noise_for_steps(self._target, rate, steps, self.delta, self._counted)
            logger.info("record-dp-target-epsilon=%g: noise multiplier %.4g", self._target, self.noise_multiplier)
        return Steps(self.noise_multiplier or 0.0, rate, self._steps)

    def _tell_spent(self, run: Run, epsilon: float) -> None:
        """Log that the run ends before this round, which would cost ``epsilon`` in total; raise if it is the first."""
        if len(self._counted) <= self._of_inputs:
            raise ConfigError(
                f"dp-max-epsilon={self._limit}: round {run.report.server_round} would bring epsilon to {epsilon:.4g}. "
                "Use more noise, a smaller batch-size or fewer local-steps, or leave small clients out."
            )
        logger.warning(
            "epsilon is %.4g, and a further round would bring it to %.4g, above %g: the run ends.",
            self._cost(),
            epsilon,
            self._limit,
        )

    def release_inputs(self, noise_multiplier: float, asked: int) -> None:
        """Note the sums of each client's inputs: one step over all of its examples, with z."""
        self._restore([])  # a run that was killed before round 1 counts these sums twice, as it must
        release = Steps(noise_multiplier if self.settings.noise.secret else 0.0, 1.0, 1)
        refuse_inputs(self._limit, self._cost(release))
        note(self._file, release)
        self.releases.append(release)
        self._of_inputs = len(self.releases)

    def config(self) -> Mapping[str, Any]:
        """Return the noise that was chosen for the clients."""
        return {NOISE: self.noise_multiplier} if self._target and self.noise_multiplier else {}

    def open_round(
        self, run: Run, messages: Sequence[tuple[Node, Message]], grid: Grid, timeout: float
    ) -> list[Message]:
        """Note what the round costs, before any client works; return the messages to clients whose cost is known.

        Raises:
            ConfigError: in the first round no client says how many examples it has.
        """
        self.always_releases = self._until_frozen is not None and not any(
            merged_config(message).get(FROZEN) for _, message in messages
        )
        self._check_delta(max((node.num_examples or 0 for node, _ in messages), default=0))
        if self._until_frozen and self.always_releases:
            sent = self._until_frozen.config()
            return [with_config(message, sent) for _, message in messages]
        for node in (node for node, _ in messages if not node.num_examples):
            run.report.reject(node.node_id, f"{node}: {_LACKS_COUNT}")
            logger.warning("round %d: %s: %s", run.report.server_round, node, _LACKS_COUNT)
        counts = [node.num_examples for node, _ in messages if node.num_examples]
        if messages and not counts and len(self.releases) <= self._of_inputs:
            raise ConfigError(f"record-dp: no client says how many training examples it has; of each: {_LACKS_COUNT}")
        if counts:
            self._release(min(counts))
        run.report.privacy = {"noise-multiplier": self.noise_multiplier or 0.0}
        self._tell(run)
        return [message for node, message in messages if node.num_examples]

    def _release(self, smallest: int) -> None:
        """Note a round of DP-SGD in which the smallest client has so many examples."""
        noise = self.noise_multiplier if self.settings.noise.secret else None
        release = Steps(noise or 0.0, sampling_rate(smallest, self._batch_size), self._steps)
        note(self._file, release)
        self.releases.append(release)

    def _check_delta(self, largest: int) -> None:
        if self.noise_multiplier and self.delta * largest >= 1 and not self._warned:
            self._warned = True
            logger.warning(
                "dp-delta=%g is not below 1 / %d, the number of examples of the largest client: a mechanism that "
                "publishes one example at random would have such a delta. Use a smaller one.",
                self.delta,
                largest,
            )

    def check(self, run: Run, reply: Reply, before: State) -> None:
        """Refuse a reply of a client that does not say that it did what is counted.

        In a round with client-level noise refuse an update that its client should have clipped.
        """
        if self._until_frozen and self.always_releases:
            self._until_frozen.check(run, reply, before)
            return
        if (done := _steps_in(reply.info.record_dp)) is None:
            raise ClientPartError(
                "the reply does not say that the client trained with DP-SGD. Pass record_level= to its TorchClient; "
                "another client adds DPSGD.reply(steps) to its metrics."
            )
        if weaker := _weaker(done, self.releases[-1]):
            raise ClientPartError(
                f"the client trained with {', '.join(weaker)}: it costs more than is counted. Give the client and "
                "RecordLevelDP the same settings, steps and batch size."
            )

    def pool(self, run: Run, replies: Sequence[Reply], before: State) -> Sequence[Reply]:
        """Return the replies; before BN is frozen, one reply with client-level noise."""
        if not self._until_frozen or not self.always_releases:
            return replies
        pooled = self._until_frozen.pool(run, replies, before)
        self._tell(run)
        return pooled

    def _tell(self, run: Run) -> None:
        if math.isfinite(epsilon := self.epsilon()):
            run.report.privacy |= {"epsilon": epsilon, "delta": self.delta}
            logger.info("%s", self.guarantee())

    @property
    def _secret(self) -> bool:
        return self.settings.noise.secret and (self._until_frozen is None or self._until_frozen.noise.secret)

    @property
    def _counted(self) -> list[Steps]:
        """All rounds so far."""
        before = self._until_frozen.accountant.releases if self._until_frozen else ()
        return [_of_client_noise(release.noise_multiplier) for release in before] + self.releases

    def _cost(self, *more: Steps) -> float:
        return epsilon_of_steps([*self._counted, *more], self.delta)

    def epsilon(self) -> float:
        """Return epsilon of the rounds so far; infinity without noise, or with noise that can be repeated."""
        return self._cost() if self._secret else math.inf

    def guarantee(self) -> str:
        """Return what is guaranteed, in a sentence."""
        if not self._secret:
            return "No privacy is guaranteed: the noise can be repeated."
        if not self._counted:
            return NO_ROUND
        if not math.isfinite(epsilon := self.epsilon()):
            return "No privacy is guaranteed: there were rounds without noise, or with noise that can be repeated."
        before = len(self._until_frozen.accountant.releases) if self._until_frozen else 0
        what = "the models hide" if before else "what a client sends hides"
        trusted = "; the server is trusted while BN is not frozen" if before else ""
        of_inputs = self.settings.input_noise_multiplier > 0
        counted = "releases, with that of the inputs' sums" if of_inputs else "rounds"
        return (
            f"epsilon = {epsilon:.4g} at delta = {self.delta:g} after {before + len(self.releases)} {counted}: {what} "
            f"each training example (of the smallest client, in every round; their number is public{trusted}; "
            "DP-SGD as the clients report it)."
        )

    def stops_after(self, server_round: int) -> bool:
        """Return whether the budget is spent, or a further round of DP-SGD like the last one would cost too much."""
        alike = self.releases[-1:] if self._limit and not self.always_releases else []
        return self._spent or (bool(alike) and self._cost(*alike) > self._limit * (1 + 1e-9))

    def outcome(self) -> dict[str, Any]:
        """Return what the summary of a run says."""
        entries: dict[str, Any] = {"guarantee": self.guarantee(), "noise-multiplier": self.noise_multiplier}
        if math.isfinite(epsilon := self.epsilon()):
            entries |= {"epsilon": epsilon, "delta": self.delta}
        return {"privacy": entries}

    def state_dict(self) -> dict[str, Any]:
        """Return the rounds."""
        inner = {"until_frozen": self._until_frozen.state_dict()} if self._until_frozen else {}
        return {"releases": [list(release) for release in self.releases], **inner}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the rounds; a target epsilon chooses z anew, for the rounds that are left."""
        self._restore([Steps(*release) for release in state["releases"]])
        if self._until_frozen:
            self._until_frozen.load_state_dict(state["until_frozen"])

    def _restore(self, releases: list[Steps]) -> None:
        self.releases = restored(self._file, Steps, self.releases, releases)


def kept_between_rounds(methods: Methods) -> list[str]:
    """Return what clients keep from rounds with client-level noise, which does not cover it, for rounds of DP-SGD."""
    problems, scope = [], methods.params.momentum_scope
    if methods.local:
        problems.append(
            f"{', '.join(sorted(methods.local))} stay with the clients, which train them without noise until BN is "
            "frozen: every gradient of DP-SGD would then depend on each example"
        )
    if scope != "none":
        problems.append(f"momentum-scope={scope} carries gradients without noise into rounds of DP-SGD")
    return problems


def _of_client_noise(noise_multiplier: float) -> Steps:
    """Return what a round with client-level noise costs an example: one step over all of them, with z / 2."""
    return Steps(noise_multiplier / 2, 1.0, 1)


def _weaker(done: Steps, counted: Steps) -> list[str]:
    """Return in what a client's steps cost more than the counted ones."""
    lines = []
    if not done.noise_multiplier >= counted.noise_multiplier:
        lines.append(f"noise multiplier {done.noise_multiplier:.4g}, below {counted.noise_multiplier:.4g}")
    if not done.rate <= counted.rate * (1 + 1e-9):
        lines.append(f"q = {done.rate:.4g}, above {counted.rate:.4g}")
    if not done.steps <= counted.steps:
        lines.append(f"{done.steps:g} steps, above {counted.steps}")
    return lines


def _steps_in(text: str) -> Steps | None:
    """Return the steps in a client's report; None if there are none."""
    try:
        known = json.loads(text)
        noise, rate, steps = (float(known[key]) for key in Steps._fields)
        return Steps(noise, rate, int(steps))
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
        return None
