r"""Client-level differential privacy: the average of clipped updates, with Gaussian noise, for models with BatchNorm.

McMahan et al. 2018, "Learning Differentially Private Recurrent Language Models", arXiv:1710.06963 (fixed clipping);
Andrew et al. 2021, "Differentially Private Learning with Adaptive Clipping", arXiv:1905.03871 (dp-clipping=adaptive).

## Problem

Clipping and noise treat the model as one long vector. With BatchNorm this fails: the int64 counters dominate the norm,
so that little of the update is left after clipping, and noise makes running variances negative.

## Algorithm

$u_i$ is the update of client $i$ in the coordinates of ``privacy.coordinates``, without counters and without what stays
with the client; $m$ is the number of clients that were asked, also of those that did not answer, which add nothing.

$$\bar u = \frac{1}{m} \sum_i u_i \min\left(1, \frac{C}{\lVert u_i \rVert}\right) +
\mathcal{N}\left(0, \left(\frac{z C}{m}\right)^2 I\right)$$

The method gets the state of $\bar u$ in place of the clients' replies, and may use it in any way at no further cost.
Counters are not averaged: they count the rounds, since a number of batches would tell $|D_i|$. A round is always
released, also if few clients or none have answered: whether a client answers can depend on its data.

Adaptive clipping: $b$ is the share of clients with $\lVert u_i \rVert \le C$, from the sum of $b_i - 1/2$ with noise of
deviation $\sigma_b = \max(m / 20, z)$, and $C \leftarrow C \exp(-\eta (b - \gamma))$. The two noises together cost as
much as one noise with multiplier $z$: the updates get $z_u = (z^{-2} - (2 \sigma_b)^{-2})^{-1/2}$.

## What it protects

The global models of all rounds, against everybody who sees them, at the level of a client (``privacy.accounting`` says
what epsilon rests on). The server is trusted: it sees the replies, with ``where="client"`` clipped ones. What else the
server writes for itself is not covered: log, checkpoints, the split and the report of the data. Metrics of clients are
withheld, or published without protection.

## Law

Without noise and clipping the result is that of the unprotected method with equal weights. One client changes the
average by at most $C / m$.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedbn_flwr.batchnorm.averaging import Array, State
from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.errors import ClientPartError, ConfigError, ReplyError
from fedbn_flwr.messages.protocol import Key
from fedbn_flwr.privacy.accounting import Neighbours, PrivacyAccountant, Release, require_dp_accounting
from fedbn_flwr.privacy.coordinates import Coordinates, Update, norm
from fedbn_flwr.privacy.noise import Noise, SystemNoise
from fedbn_flwr.privacy.settings import Settings, setting
from fedbn_flwr.server.method import Method
from fedbn_flwr.server.nodes import Node
from fedbn_flwr.server.protection import Protection
from fedbn_flwr.server.replies import Reply
from fedbn_flwr.server.run_state import RunState

__all__ = [
    "CLIP",
    "NO_ROUND",
    "SCALE",
    "ClientLevelDP",
    "DPSettings",
    "clipped",
    "clipping_factor",
    "conflicts",
    "own_hooks",
]

logger = logging.getLogger("flwr")

CLIP = Key("fedbn-flwr.dp-clipping-norm", "float: C", "server", "client")
SCALE = Key("fedbn-flwr.dp-statistics-scale", "float: s", "server", "client")

NO_ROUND = "No round has been released."
_NOISY = 0.3  # noise in running variances, relative to them, from which on a warning says so


class DPSettings(Settings):
    """The settings of client-level differential privacy."""

    dp: Literal["off", "server", "client"] = setting(
        "off",
        "client-level differential privacy of the global models: who clips the updates (the server adds the noise); "
        "`record` is short for record-dp=true",
    )
    dp_noise_multiplier: float = setting(
        0.0, "z: the noise in the sum of updates has deviation z C; 0 = clipping alone, which guarantees nothing", ge=0
    )
    dp_clipping: Literal["fixed", "adaptive"] = setting(
        "fixed", "adaptive = with dp=server C follows a quantile of the updates' norms"
    )
    dp_clipping_norm: float = setting(
        1.0, "C: largest norm of a client's update; if C adapts, its value in round 1", gt=0
    )
    dp_clipping_quantile: float = setting(
        0.5, "gamma: C adapts until this share of the updates is not clipped", gt=0, lt=1
    )
    dp_clipping_rate: float = setting(0.2, "eta: how fast C adapts", gt=0)
    dp_statistics_scale: float = setting(
        0.1,
        "weight s of BN's running statistics in the norm; a larger one has less noise in them, more elsewhere",
        gt=0,
    )
    dp_delta: float = setting(
        1e-5,
        "delta for which epsilon is stated; well below 1 / number of clients, with record-dp well below 1 / number of "
        "examples of the largest client",
        gt=0,
        lt=1,
    )
    dp_neighbours: Neighbours = setting(
        "zero-out",
        "what epsilon hides: whether a client sends its update or nothing, or (replace-one) which data it has",
    )
    dp_sampling: Literal["known", "secret"] = setting(
        "known",
        "known = clients are drawn with the seed, and epsilon counts each as if it took part in every round; secret = "
        "they are drawn anew in every run and withheld, and epsilon is smaller for those who see the models alone",
    )
    dp_target_epsilon: float = setting(
        0.0, "choose the noise multiplier so that R rounds cost this epsilon; 0 = dp-noise-multiplier", ge=0
    )
    dp_max_epsilon: float = setting(0.0, "the run ends before a round that would cost more in total; 0 = none", ge=0)
    dp_metrics: Literal["withheld", "published"] = setting(
        "withheld", "the clients' metrics, which epsilon does not cover: left out of all outputs, or not"
    )


def conflicts(settings: DPSettings) -> list[str]:
    """Return why these settings cannot be used together, one line each."""
    found = []
    if settings.dp_target_epsilon and settings.dp_noise_multiplier:
        found.append(
            f"dp-target-epsilon={settings.dp_target_epsilon} chooses the noise; leave "
            f"dp-noise-multiplier={settings.dp_noise_multiplier} out"
        )
    if settings.dp_max_epsilon and not (settings.dp_noise_multiplier or settings.dp_target_epsilon):
        found.append(
            f"dp-max-epsilon={settings.dp_max_epsilon} needs noise: without it the first round already costs more"
        )
    if settings.dp_max_epsilon and settings.dp_max_epsilon < settings.dp_target_epsilon:
        found.append(
            f"dp-max-epsilon={settings.dp_max_epsilon} is below dp-target-epsilon={settings.dp_target_epsilon}"
        )
    if settings.dp == "client" and settings.dp_clipping == "adaptive":
        found.append(
            "dp-clipping=adaptive needs dp=server: a client that clips sends an "
            "update of norm C, up to rounding, and the server cannot count those that were longer"
        )
    if settings.dp_sampling == "secret" and settings.dp_neighbours != "replace-one":
        found.append("dp-sampling=secret needs dp-neighbours=replace-one, for which its benefit is known")
    if settings.dp_sampling == "secret" and settings.dp_metrics == "published":
        found.append("dp-sampling=secret with dp-metrics=published: the metrics would tell who was drawn")
    return found


def unused(settings: DPSettings) -> dict[str, str]:
    """Return the settings that have no effect under the others, by name, each with what it needs."""
    if settings.dp == "off":
        return dict.fromkeys(set(DPSettings.model_fields) - {"dp"}, "it is for dp=server and dp=client")
    found: dict[str, str] = {}
    if settings.dp_clipping == "fixed":
        found |= dict.fromkeys(("dp_clipping_quantile", "dp_clipping_rate"), "it is for dp-clipping=adaptive")
    if not (settings.dp_noise_multiplier or settings.dp_target_epsilon):
        found |= dict.fromkeys(("dp_delta", "dp_neighbours"), "without noise there is no epsilon")
    return found


class ClientLevelDP(Protection):
    """The average of clipped updates, with noise.

    Args:
        settings: clipping, noise and accounting; ``dp`` says who clips.
        noise: the source of noise; another one than ``SystemNoise`` is for tests, and no epsilon is stated then.
        file: a file for the releases, see ``PrivacyAccountant``.
        fixed: names of the entries that no client trains (a frozen backbone, a constant buffer): they get no noise, and
            a reply that changed them is refused. ``fixed_entries(model)`` of ``fedbn_flwr.batchnorm.parts`` finds them.
        tied: names of the entries that are the same tensor as another one, and its name.

    Attributes:
        clipping_norm: C of the next round.
        noise_multiplier: z; None before the first round, where it comes from a target epsilon.
        accountant: the releases so far, of all runs with this object.
        tells: whether it logs and reports epsilon; not where another protection does so for the whole run.

    Raises:
        ConfigError: settings exclude each other, or the library that computes epsilon is not installed.
    """

    always_releases = True
    tells = True

    def __init__(
        self,
        settings: DPSettings,
        noise: Noise | None = None,
        file: Path | None = None,
        fixed: Collection[str] = (),
        tied: Mapping[str, str] | None = None,
    ) -> None:
        self.settings, self.noise, self._fixed = settings, noise or SystemNoise(), frozenset(fixed)
        self._tied = dict(tied or {})
        self.publishes_metrics = settings.dp_metrics == "published"
        self.secret_sampling = settings.dp_sampling == "secret"
        if problems := conflicts(settings):
            raise ConfigError("\n".join(problems))
        if settings.dp_noise_multiplier or settings.dp_target_epsilon:
            require_dp_accounting()
        self.accountant = PrivacyAccountant(settings.dp_delta, settings.dp_neighbours, file)
        self.accountant.restore(())
        self._local: frozenset[Part] = frozenset()
        self._begin()

    def begin(self, method: Method[Any]) -> None:
        """Start with the first clipping norm; check that nothing of the clients bypasses the noise.

        Raises:
            ConfigError: the method sends or uses more of a client than its update.
        """
        self._begin()
        self._local = method.local
        problems = list(method.beside_updates().values())
        if unknown := own_hooks(type(method)):
            problems.append(
                f"{unknown[0].__name__} reads replies in a method of its own; let its beside_updates() return what it "
                "takes from a client beside the update (super().beside_updates() if nothing)"
            )
        if self.secret_sampling and method.local:
            problems.append(
                "dp-sampling=secret: a client's first message is larger than the next ones, so traffic tells who was "
                "drawn before; use dp-sampling=known"
            )
        if problems:
            subject = f"strategy {method.name!r} with dp={self.settings.dp}"
            raise ConfigError("\n".join(f"{subject}: {what}" for what in problems))

    def _begin(self) -> None:
        own = self.settings
        self.clipping_norm = own.dp_clipping_norm
        self.noise_multiplier = None if own.dp_target_epsilon else own.dp_noise_multiplier
        self._spent = False

    def config(self) -> Mapping[str, Any]:
        """Return C and s for the mod of a client that clips."""
        if self.settings.dp == "server":
            return {}
        return {CLIP: self.clipping_norm, SCALE: self.settings.dp_statistics_scale}

    def check(self, run: RunState, reply: Reply, before: State) -> None:
        """Refuse an update that its client should have clipped, or that has changed a fixed entry."""
        for name in self._fixed & reply.state.keys():
            if not np.array_equal(reply.state[name], before[name]):
                raise ReplyError(
                    f"entry '{name}' changed, and no client trains it: it is frozen (train-only), or a buffer that is "
                    "taken for a constant. If the model changes it in training, leave it out of fixed="
                )
        if self.settings.dp == "client":
            coordinates = self._coordinates(run, before)
            length = norm(coordinates.update(reply.state))
            if not length <= self.clipping_norm + 2 * coordinates.rounding():
                raise ClientPartError(
                    f"its update has norm {length:.4g}, and dp=client asks the client to clip it to "
                    f"{self.clipping_norm:.4g}. Make `clipped_update` of fedbn_flwr.mods the app's first mod, or use "
                    "dp=server."
                )

    def pool(self, run: RunState, replies: Sequence[Reply], before: State) -> Sequence[Reply]:
        """Return one reply: the state of the average of the clipped updates, with noise."""
        own, asked = self.settings, run.report.asked
        self._release(run)
        coordinates = self._coordinates(run, before)
        total: dict[str, Array] = {name: 0 * array for name, array in coordinates.update(before).items()}
        surplus = 0.0  # sum of b_i - 1/2
        for reply in replies:
            update = coordinates.update(reply.state)
            factor, fits = clipping_factor(update, self.clipping_norm)
            surplus += fits - 0.5
            for name, array in update.items() if factor else ():
                total[name] += factor * array
        of_bits, of_updates = self._split(self.noise_multiplier or 0.0, asked)
        deviation = of_updates * self.clipping_norm / asked
        for array in total.values():
            array /= asked
            array += deviation * self.noise.normal(array.shape)
        state = coordinates.state(total, deviation)
        state |= {name: state[name] + 1 for name in run.parts.counters if name in state}
        if own.dp_clipping == "adaptive":
            share = 0.5 + (surplus + of_bits * float(self.noise.normal(()))) / asked
            self.clipping_norm *= math.exp(-own.dp_clipping_rate * (min(max(share, 0), 1) - own.dp_clipping_quantile))
        return [Reply(Node(0), 1.0, state, {})]

    def _coordinates(self, run: RunState, before: State) -> Coordinates:
        part_of = run.parts.part_of
        shared = {name: array for name, array in before.items() if part_of[name] not in self._local}
        return Coordinates(shared, run.parts, self.settings.dp_statistics_scale, self._fixed, self._tied)

    def _split(self, noise_multiplier: float, asked: int) -> tuple[float, float]:
        """Return the deviation of the noise in the sum of bits, and z_u; without adaptive clipping 0 and z."""
        if self.settings.dp_clipping == "fixed":
            return 0.0, noise_multiplier
        of_bits = max(asked / 20, noise_multiplier)
        return of_bits, noise_multiplier / math.sqrt(1 - (noise_multiplier / (2 * of_bits)) ** 2)

    def admits(self, run: RunState, asked: int) -> bool:
        """Return whether a round with so many clients keeps within the budget; choose the noise for a target epsilon.

        Raises:
            ConfigError: not even one round does.
        """
        own, accountant = self.settings, self.accountant
        limit = own.dp_max_epsilon or own.dp_target_epsilon
        if self.noise_multiplier is None and accountant.epsilon() < own.dp_target_epsilon:
            left = run.total_rounds - len(run.reports) + 1 - run.after
            self.noise_multiplier = accountant.noise_for(
                own.dp_target_epsilon, asked, run.num_able, left, self.secret_sampling
            )
            logger.info("dp-target-epsilon=%g: noise multiplier %.4g", own.dp_target_epsilon, self.noise_multiplier)
        if not accountant.releases:
            self._warn(run, asked)
        if not limit:
            return True
        z = self.noise_multiplier
        cost = math.inf if z is None else accountant.epsilon([Release(z, asked, run.num_able, self.secret_sampling)])
        self._spent = cost > limit * (1 + 1e-9)
        if not self._spent:
            return True
        if not accountant.releases:
            raise ConfigError(
                f"dp-max-epsilon={own.dp_max_epsilon}: round {run.report.server_round} would bring epsilon to "
                f"{cost:.4g}. Use more noise (dp-noise-multiplier), or more clients."
            )
        logger.warning(
            "epsilon is %.4g, and a round with %d of %d clients would bring it above %g: the run ends.",
            accountant.epsilon(),
            asked,
            run.num_able,
            limit,
        )
        return False

    def _warn(self, run: RunState, asked: int) -> None:
        own = self.settings
        if self.tells and self.noise_multiplier and own.dp_delta * run.num_able >= 1:
            logger.warning(
                "dp-delta=%g is not below 1 / %d, the number of clients: a mechanism that publishes one client at "
                "random would have such a delta. Use a smaller one.",
                own.dp_delta,
                run.num_able,
            )
        size = (self.noise_multiplier or 0.0) * self.clipping_norm / (asked * own.dp_statistics_scale)
        if size > _NOISY and Part.STATISTICS not in self._local:
            logger.warning(
                "in each round the noise in BN's running variances has %.2g times their own size (z C / (m s)), which "
                "makes them useless. "
                "Use a smaller dp-clipping-norm, more clients, a larger dp-statistics-scale, or a method that does not "
                "send statistics (fedbn, silobn, or fixbn with an early freeze-at).",
                size,
            )

    def _release(self, run: RunState) -> None:
        """Note the release of this round, before its result exists; report what it costs."""
        if self.noise_multiplier is None:
            raise ConfigError("no noise was chosen for this round: admits() was not called")
        z = self.noise_multiplier if self.noise.secret else 0.0
        release = Release(z, run.report.asked, run.num_able, self.secret_sampling)
        self.accountant.add(release)
        run.report.privacy = {"clipping-norm": self.clipping_norm, "noise-multiplier": self.noise_multiplier}
        if self.tells and self.guarantees:
            run.report.privacy |= {"epsilon": self.accountant.epsilon(), "delta": self.settings.dp_delta}
            logger.info("%s", self.guarantee())

    @property
    def guarantees(self) -> bool:
        """Whether there are releases, with a finite epsilon: all have noise, which nobody can repeat."""
        return bool(self.accountant.releases) and self.noise.secret and math.isfinite(self.accountant.epsilon())

    def guarantee(self) -> str:
        """Return what is guaranteed, in a sentence."""
        own, accountant = self.settings, self.accountant
        if not self.noise.secret:
            return "No privacy is guaranteed: the noise can be repeated."
        if not own.dp_noise_multiplier and not own.dp_target_epsilon:
            return "No privacy is guaranteed: updates are clipped, without noise."
        if not accountant.releases:
            return NO_ROUND
        if not math.isfinite(epsilon := accountant.epsilon()):
            return "No privacy is guaranteed: there were releases without noise, or with noise that can be repeated."
        what = (
            "whether a client's update is in the sums" if own.dp_neighbours == "zero-out" else "which data a client has"
        )
        against = ", from all but clients" if any(release.secret for release in accountant.releases) else ""
        return (
            f"epsilon = {epsilon:.4g} at delta = {own.dp_delta:g} after {len(accountant.releases)} releases: the "
            f"models hide {what}{against}."
        )

    def stops_after(self, server_round: int) -> bool:
        """Return whether a further round, with as many clients as the last, would cost too much in total."""
        limit, releases = self.settings.dp_max_epsilon or self.settings.dp_target_epsilon, self.accountant.releases
        return self._spent or (bool(limit and releases) and self.accountant.epsilon(releases[-1:]) > limit)

    def outcome(self) -> dict[str, Any]:
        """Return what the summary of a run says."""
        found: dict[str, Any] = {"guarantee": self.guarantee(), "noise-multiplier": self.noise_multiplier}
        if self.guarantees:
            found |= {"epsilon": self.accountant.epsilon(), "delta": self.settings.dp_delta}
        return {"privacy": found}

    def state_dict(self) -> dict[str, Any]:
        """Return C, z and the releases."""
        return {
            "clipping_norm": self.clipping_norm,
            "noise_multiplier": self.noise_multiplier,
            "releases": [list(release) for release in self.accountant.releases],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore C, z and the releases; a target epsilon chooses z anew, for the rounds that are left."""
        self.clipping_norm = state["clipping_norm"]
        self.noise_multiplier = None if self.settings.dp_target_epsilon else state["noise_multiplier"]
        self.accountant.restore(Release(*release) for release in state["releases"])


def clipping_factor(update: Update, clipping_norm: float) -> tuple[float, bool]:
    """Return the factor that brings an update to ``clipping_norm`` if it is longer, and whether it was not longer.

    The factor of an update whose length is not finite is 0.
    """
    length = norm(update)
    if not math.isfinite(length):
        return 0.0, False
    return min(1.0, clipping_norm / length) if length else 1.0, length <= clipping_norm


def clipped(update: Update, clipping_norm: float) -> dict[str, Array]:
    """Return the update, scaled to ``clipping_norm`` if it is longer; zero if its length is not finite."""
    factor, _ = clipping_factor(update, clipping_norm)
    return {name: factor * array if factor else np.zeros_like(array) for name, array in update.items()}


def own_hooks(kind: type[Method[Any]]) -> list[type]:
    """Return the classes of other projects that read replies and do not say what they take."""
    reads, says = {"combine", "weights", "check"}, "beside_updates"
    foreign = [one for one in kind.__mro__ if not one.__module__.startswith(("fedbn_flwr.", "flwr."))]
    return [one for one in foreign if vars(one).keys() & reads and says not in vars(one)]
