r"""Client-level differential privacy: the average of clipped updates, with Gaussian noise, for models with BatchNorm.

McMahan et al. 2018, "Learning Differentially Private Recurrent Language Models", arXiv:1710.06963 (fixed clipping);
Andrew et al. 2021, "Differentially Private Learning with Adaptive Clipping", arXiv:1905.03871 (clipping-quantile).

## Problem

Clipping and noise treat the model as one long vector. With BatchNorm this fails: the int64 counters dominate the norm,
so that little of the update is left after clipping, and noise makes running variances negative.

## Algorithm

$u_i$ is the update of client $i$ in the coordinates of ``privacy.coordinates``, without counters and without what stays
with the client; $m$ is the number of clients that were asked, also of those that did not answer: their update is zero.

$$\bar u = \frac{1}{m} \sum_i u_i \min\left(1, \frac{C}{\lVert u_i \rVert}\right) +
\mathcal{N}\left(0, \left(\frac{z C}{m}\right)^2 I\right)$$

The method gets the state of $\bar u$ in place of the clients' replies; what it does with it costs nothing more.
Counters are not averaged: they count the rounds, since a number of batches would tell $|D_i|$.

Adaptive clipping: $b$ is the share of clients with $\lVert u_i \rVert \le C$, from the sum of $b_i - 1/2$ with noise of
deviation $\sigma_b = \max(m / 20, z)$, and $C \leftarrow C \exp(-\eta (b - \gamma))$. Both noises together cost what
one of multiplier $z$ does, because the updates get $z_u = (z^{-2} - (2 \sigma_b)^{-2})^{-1/2}$.

## What it protects

The sequence of global models, against everybody who sees them, at the level of a client (``privacy.accounting`` says
what epsilon rests on). The server is trusted: it sees the replies. With ``where="client"`` it sees clipped updates.
Metrics of clients are outside: they are withheld, or published without protection.

## Law

Without noise and clipping the result is that of the unprotected method with equal weights. One client changes the
average by at most $C / m$.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from fedbn_flwr.batchnorm.averaging import Array, State
from fedbn_flwr.errors import ClientPartError, ConfigError
from fedbn_flwr.messages.protocol import Key
from fedbn_flwr.privacy.accounting import Ledger, Neighbours, Release, require_dp_accounting
from fedbn_flwr.privacy.coordinates import Coordinates, Update, norm
from fedbn_flwr.privacy.noise import Noise, SystemNoise
from fedbn_flwr.server.method import Method, Settings
from fedbn_flwr.server.method import setting as _setting
from fedbn_flwr.server.nodes import Node
from fedbn_flwr.server.protection import Protection
from fedbn_flwr.server.replies import Reply
from fedbn_flwr.server.run_state import RunState

__all__ = ["CLIP", "SCALE", "ClientLevelDP", "DPSettings", "clipped", "conflicts"]

logger = logging.getLogger("flwr")

CLIP = Key("fedbn-flwr.dp-clipping-norm", "float: C", "server", "client")
SCALE = Key("fedbn-flwr.dp-statistics-scale", "float: s", "server", "client")

_SLACK = 1e-3  # a clipped state in float32 may have an update a little longer than C


setting = functools.partial(_setting, group="privacy")


class DPSettings(Settings):
    """The settings of client-level differential privacy."""

    dp: Literal["off", "server", "client"] = setting(
        "off",
        "client-level differential privacy of the global models: who clips the updates (the server adds the noise)",
    )
    dp_noise_multiplier: float = setting(
        0.0, "z: the noise in the sum of updates has deviation z C; 0 = clipping alone, which guarantees nothing", ge=0
    )
    dp_clipping_norm: float = setting(1.0, "C: largest norm of a client's update; the first one if it adapts", gt=0)
    dp_clipping_quantile: float = setting(
        0.0, "gamma: C adapts until this share of the updates is not clipped; 0 = C is fixed", ge=0, lt=1
    )
    dp_clipping_rate: float = setting(0.2, "eta: how fast C adapts", gt=0)
    dp_statistics_scale: float = setting(
        0.1,
        "weight s of BN's running statistics in the norm; a larger one has less noise in them, more elsewhere",
        gt=0,
    )
    dp_delta: float = setting(1e-5, "delta for which epsilon is stated; well below 1 / number of clients", gt=0, lt=1)
    dp_neighbours: Neighbours = setting(
        "add-remove", "what epsilon hides: whether a client took part at all, or (replace-one) which data it has"
    )
    dp_sampling: Literal["known", "secret"] = setting(
        "known",
        "known = clients are drawn with the seed, and epsilon counts each as if it took part in every round; secret = "
        "drawn anew in every run, participants are withheld, and epsilon has the benefit (replace-one)",
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
    if settings.dp_sampling == "secret" and settings.dp_neighbours != "replace-one":
        found.append("dp-sampling=secret needs dp-neighbours=replace-one, for which its benefit is known")
    return found


def unused(settings: DPSettings) -> dict[str, str]:
    """Return the settings that have no effect under the others, by name, each with what it needs."""
    if settings.dp == "off":
        return dict.fromkeys(set(DPSettings.model_fields) - {"dp"}, "it is for dp=server and dp=client")
    return {} if settings.dp_clipping_quantile else {"dp_clipping_rate": "it is for dp-clipping-quantile above 0"}


class ClientLevelDP(Protection):
    """The average of clipped updates, with noise.

    Args:
        settings: clipping, noise and accounting; ``dp`` says who clips.
        noise: the source of noise; another one than ``SystemNoise`` is for tests, and no epsilon is stated then.
        file: a file for the releases, see ``Ledger``.

    Attributes:
        clipping_norm: C of the next round.
        noise_multiplier: z; None before the first round, where it comes from a target epsilon.
        ledger: the releases so far.

    Raises:
        ConfigError: settings exclude each other, or the library that computes epsilon is not installed.
    """

    def __init__(self, settings: DPSettings, noise: Noise | None = None, file: Path | None = None) -> None:
        self.settings, self.noise, self._file = settings, noise or SystemNoise(), file
        self.publishes_metrics = settings.dp_metrics == "published"
        self.secret_sampling = settings.dp_sampling == "secret"
        if problems := conflicts(settings):
            raise ConfigError("\n".join(problems))
        if settings.dp_noise_multiplier or settings.dp_target_epsilon:
            require_dp_accounting()
        self._forget()

    def begin(self, method: Method[Any]) -> None:
        """Forget an earlier run; check that nothing of the clients goes round the noise.

        Raises:
            ConfigError: the method sends or uses more of a client than its update.
        """
        self._forget()
        if beside := method.beside_updates():
            subject = f"strategy {method.name!r} with dp={self.settings.dp}"
            raise ConfigError("\n".join(f"{subject}: {what}" for what in beside.values()))

    def _forget(self) -> None:
        own = self.settings
        self.clipping_norm = own.dp_clipping_norm
        self.noise_multiplier = None if own.dp_target_epsilon else own.dp_noise_multiplier
        self.ledger = Ledger(own.dp_delta, own.dp_neighbours, self.secret_sampling, self._file)
        self.ledger.restore(())

    def config(self) -> Mapping[str, Any]:
        """Return C and s for the mod of a client that clips."""
        if self.settings.dp == "server":
            return {}
        return {CLIP: self.clipping_norm, SCALE: self.settings.dp_statistics_scale}

    def check(self, run: RunState, reply: Reply, before: State) -> None:
        """Refuse an update that its client should have clipped."""
        if self.settings.dp == "client":
            length = norm(self._coordinates(run, reply, before).update(reply.state))
            if length > self.clipping_norm * (1 + _SLACK):
                raise ClientPartError(
                    f"its update has norm {length:.4g}, and dp=client asks the client to clip it to "
                    f"{self.clipping_norm:.4g}. Make `clipped_update` of fedbn_flwr.mods the app's first mod, or use "
                    "dp=server."
                )

    def pool(self, run: RunState, replies: Sequence[Reply], before: State) -> Sequence[Reply]:
        """Return one reply: the state of the average of the clipped updates, with noise."""
        own, asked = self.settings, run.report.asked
        release = self._release(run)
        coordinates = self._coordinates(run, replies[0], before)
        total: dict[str, Array] = {}
        surplus = 0.0  # sum of b_i - 1/2
        for reply in replies:
            update, fits = clipped(coordinates.update(reply.state), self.clipping_norm)
            surplus += fits - 0.5
            total = {name: array + total.get(name, 0.0) for name, array in update.items()}
        of_bits, of_updates = self._split(release.noise_multiplier, asked)
        deviation = of_updates * self.clipping_norm / asked
        average = {name: array / asked + deviation * self.noise.normal(array.shape) for name, array in total.items()}
        state = coordinates.state(average, deviation)
        state |= {name: state[name] + 1 for name in run.parts.counters if name in state}
        if own.dp_clipping_quantile:
            share = 0.5 + (surplus + of_bits * float(self.noise.normal(()))) / asked
            self.clipping_norm *= math.exp(-own.dp_clipping_rate * (share - own.dp_clipping_quantile))
        return [Reply(Node(0), 1.0, state, {})]

    def _coordinates(self, run: RunState, reply: Reply, before: State) -> Coordinates:
        return Coordinates({name: before[name] for name in reply.state}, run.parts, self.settings.dp_statistics_scale)

    def _split(self, noise_multiplier: float, asked: int) -> tuple[float, float]:
        """Return the deviation of the noise in the sum of bits, and z_u; without adaptive clipping 0 and z."""
        if not self.settings.dp_clipping_quantile:
            return 0.0, noise_multiplier
        of_bits = max(asked / 20, noise_multiplier)
        return of_bits, noise_multiplier / math.sqrt(1 - (noise_multiplier / (2 * of_bits)) ** 2)

    def _release(self, run: RunState) -> Release:
        """Note the release of this round, before its result exists; report what it costs."""
        own, (sampled, population) = self.settings, (run.report.asked, run.num_able)
        if self.noise_multiplier is None:
            left = run.total_rounds - run.after
            self.noise_multiplier = self.ledger.noise_for(own.dp_target_epsilon, sampled, population, left)
            logger.info("dp-target-epsilon=%g: noise multiplier %.4g", own.dp_target_epsilon, self.noise_multiplier)
        release = Release(self.noise_multiplier, sampled, population)
        if own.dp_max_epsilon and (cost := self.ledger.epsilon([release])) > own.dp_max_epsilon:
            raise ConfigError(
                f"dp-max-epsilon={own.dp_max_epsilon}: round {run.report.server_round} would bring epsilon to "
                f"{cost:.4g}. Use more noise (dp-noise-multiplier), or more clients."
            )
        self.ledger.add(release)
        run.report.privacy = {"clipping-norm": self.clipping_norm, "noise-multiplier": self.noise_multiplier}
        if self.guarantees:
            run.report.privacy |= {"epsilon": self.ledger.epsilon(), "delta": own.dp_delta}
            logger.info("%s", self.guarantee())
        return release

    @property
    def guarantees(self) -> bool:
        """Whether the releases so far have a finite epsilon: all have noise, which nobody can repeat."""
        return self.noise.secret and math.isfinite(self.ledger.epsilon())

    def guarantee(self) -> str:
        """Return what is guaranteed, in a sentence."""
        if not self.noise.secret:
            return "No privacy is guaranteed: the noise can be repeated."
        epsilon, own, ledger = self.ledger.epsilon(), self.settings, self.ledger
        if not math.isfinite(epsilon):
            return "No privacy is guaranteed: updates are clipped, without noise."
        what = "whether a client took part" if own.dp_neighbours == "add-remove" else "which data a client has"
        drawn = "drawn secretly" if self.secret_sampling else "whoever takes part"
        return (
            f"epsilon = {epsilon:.4g} at delta = {own.dp_delta:g} after {len(ledger.releases)} rounds: the models hide "
            f"{what} ({drawn})."
        )

    def stops_after(self, server_round: int) -> bool:
        """Return whether a further round, with as many clients as the last, would exceed ``dp_max_epsilon``."""
        limit, releases = self.settings.dp_max_epsilon, self.ledger.releases
        return bool(limit and releases) and self.ledger.epsilon(releases[-1:]) > limit

    def outcome(self) -> dict[str, Any]:
        """Return what the summary of a run says."""
        found: dict[str, Any] = {"guarantee": self.guarantee(), "noise-multiplier": self.noise_multiplier}
        if self.guarantees:
            found |= {"epsilon": self.ledger.epsilon(), "delta": self.settings.dp_delta}
        return {"privacy": found}

    def state_dict(self) -> dict[str, Any]:
        """Return C, z and the releases."""
        return {
            "clipping_norm": self.clipping_norm,
            "noise_multiplier": self.noise_multiplier,
            "releases": [list(release) for release in self.ledger.releases],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore C, z and the releases."""
        self.clipping_norm, self.noise_multiplier = state["clipping_norm"], state["noise_multiplier"]
        self.ledger.restore(Release(*release) for release in state["releases"])


def clipped(update: Update, clipping_norm: float) -> tuple[dict[str, Array], bool]:
    """Return the update, scaled to ``clipping_norm`` if it is longer, and whether it was not longer."""
    length = norm(update)
    factor = min(1.0, clipping_norm / length) if length else 1.0
    return {name: factor * array for name, array in update.items()}, length <= clipping_norm
