r"""Client-level differential privacy for models with BatchNorm.

McMahan et al. 2018, "Learning Differentially Private Recurrent Language Models",
arXiv:1710.06963.

## Problem

Clipping and noise treat the model as one long vector. With BatchNorm this fails. The
int64 counters dominate the norm, so that little of the update remains after clipping,
and noise makes running variances negative.

## Algorithm

$u_i$ is the update of client $i$ in the coordinates of ``privacy.coordinates``, without
counters and without entries that stay with the client. $m$ is the number of asked
clients, including clients without an answer, which add nothing.

$$\bar u = \frac{1}{m} \sum_i u_i \min\left(1, \frac{C}{\lVert u_i \rVert}\right) +
\mathcal{N}\left(0, \left(\frac{z C}{m}\right)^2 I\right)$$

The method gets the state of $\bar u$ instead of the clients' replies, and may use it in
any way at no further cost. Counters are not averaged. They count rounds, because a
number of batches would reveal $|D_i|$. A round is always released, even if few clients
or none have answered, because the existence of an answer can depend on the data.

## What it protects

The protection covers the global models of all rounds, against everybody who sees them,
at the level of a client. ``privacy.accounting`` explains the assumptions of epsilon.
The server is trusted, because it sees the replies; with ``where="client"`` these are
clipped. Other files of the server are not covered: the log, checkpoints, the split and
the report of the data. Metrics of clients are withheld, because no noise covers them.

## Law

Without noise and clipping, the result equals the result of the unprotected method with
equal weights. One client changes the average by at most $C / m$.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.errors import ClientPartError, ReplyError
from fedbn_flwr.privacy.accounting import PrivacyAccountant, require_dp_accounting
from fedbn_flwr.privacy.coordinates import (
    CLIP,
    STATISTICS_SCALE,
    Coordinates,
    clipped,
    norm,
)
from fedbn_flwr.privacy.noise import normal
from fedbn_flwr.privacy.protection_settings import DPSettings
from fedbn_flwr.problems import raise_or_warn
from fedbn_flwr.server.methods.method import Facts, Node, Reply
from fedbn_flwr.server.methods.phases import NONE, PartSet
from fedbn_flwr.server.methods.together import Methods
from fedbn_flwr.server.runs.protection import Protection, uncovered
from fedbn_flwr.server.runs.round_report import RoundReport

logger = logging.getLogger("flwr")

NO_ROUND = "No round has been released."
# Relative noise in running variances above which a warning is logged.
_NOISY = 0.3


class ClientLevelDP(Protection):
    """The average of clipped updates, with noise.

    Args:
        settings: clipping, noise and accounting. ``dp`` selects the side that clips.
        file: a file for the releases, see ``PrivacyAccountant``.
        fixed: names of the entries that no client trains, such as a frozen backbone or
            a constant buffer. They get no noise, and replies that changed them are
            refused. ``fixed_entries(model)`` of
            ``fedbn_flwr.batchnorm.fixed_entries`` finds them.

    Attributes:
        clipping_norm: C.
        noise_multiplier: z.
        accountant: the releases so far, of all runs with this object.

    Raises:
        ConfigError: the library that computes epsilon is not installed.
    """

    always_releases = True
    publishes_metrics = False

    def __init__(
        self,
        settings: DPSettings,
        file: Path | None = None,
        fixed: Collection[str] = (),
    ) -> None:
        self.settings = settings
        self._fixed = frozenset(fixed)
        self.clipping_norm = settings.dp_clipping_norm
        self.noise_multiplier = settings.dp_noise_multiplier
        if self.noise_multiplier:
            require_dp_accounting()
        self.accountant = PrivacyAccountant(settings.dp_delta, file)
        # Count the releases in the file as well, for example the releases of a run that
        # was killed.
        self.accountant.restore(())
        self._local: PartSet = NONE

    def begin(self, methods: Methods) -> None:
        """Refuse methods that send more than updates.

        Raises:
            ConfigError: the method sends or uses more of a client than its update.
        """
        self._local = methods.local
        raise_or_warn(uncovered(methods, "dp", self.settings.dp))

    def config(self) -> Mapping[str, Any]:
        """Return the config entries for the clients.

        They are the clipping norm C if the clients clip, otherwise nothing.
        """
        if self.settings.dp == "server":
            return {}
        return {CLIP: self.clipping_norm}

    def check(self, facts: Facts, reply: Reply) -> None:
        """Refuse an update that is too long or that changed a fixed entry.

        Raises:
            ReplyError: a fixed entry changed.
            ClientPartError: with ``dp="client"``, the update exceeds the clipping norm.
        """
        for name in self._fixed & reply.state.keys():
            if not np.array_equal(reply.state[name], facts.before[name]):
                raise ReplyError(
                    f"entry '{name}' changed, but no client trains it. It is frozen"
                    " (train-only), or a buffer that was considered constant. If the"
                    " model changes it in training, leave it out of fixed="
                )
        if self.settings.dp == "client":
            coordinates = self._coordinates(facts)
            length = norm(coordinates.update(reply.state))
            # Allow for rounding, because after clipping, the client's state was rounded
            # to its dtypes.
            if not length <= self.clipping_norm + 2 * coordinates.rounding():
                raise ClientPartError(
                    f"its update has norm {length:.4g}, but with dp=client the client"
                    f" must clip it to {self.clipping_norm:.4g}. Make `clipped_update`"
                    " of fedbn_flwr.mods the app's first mod, or use dp=server."
                )

    def pool(
        self,
        facts: Facts,
        report: RoundReport,
        replies: Sequence[Reply],
    ) -> Sequence[Reply]:
        """Return one reply, with the state of the noisy average of clipped updates."""
        if not self.accountant.releases:
            self._warn(facts, report.asked)
        # Count the release before its result exists, so that no crash hides it.
        self._release(report)
        asked, coordinates = report.asked, self._coordinates(facts)

        # Compute sum_i u_i min(1, C / |u_i|). Start from zero, the update of ``before``
        # itself.
        nothing = coordinates.update(facts.before)
        total = {name: 0 * array for name, array in nothing.items()}
        for reply in replies:
            update, _ = clipped(coordinates.update(reply.state), self.clipping_norm)
            for name, array in update.items():
                total[name] += array

        # Divide by m, the number of asked clients. The noise has deviation z C / m.
        deviation = self.noise_multiplier * self.clipping_norm / asked
        average = {}
        for name, array in total.items():
            noise = normal(array.shape)
            average[name] = array / asked + deviation * noise
        state = coordinates.state(average, deviation)

        # The counters count rounds, because a number of batches would reveal |D_i|.
        for name in facts.parts.whole.counters:
            if name in state:
                state[name] = state[name] + 1
        return [Reply(Node(0), 1.0, state, {})]

    def _coordinates(self, facts: Facts) -> Coordinates:
        part_of = facts.parts.part_of
        shared = {
            name: array
            for name, array in facts.before.items()
            if part_of[name] not in self._local | {Part.FIXED}
        }
        return Coordinates(shared, facts.parts, self._fixed)

    def _warn(self, facts: Facts, asked: int) -> None:
        """Warn about a useless delta, and about noise that makes statistics useless."""
        own = self.settings
        if self.noise_multiplier and own.dp_delta * facts.num_able >= 1:
            logger.warning(
                "dp-delta=%g is not below 1 / number of clients = 1 / %d. A mechanism"
                " that publishes one random client would have such a delta. Use a"
                " smaller delta.",
                own.dp_delta,
                facts.num_able,
            )
        # ``size`` is the deviation z C / m of the noise, relative to the running
        # variances. Their coordinates have the scale s.
        noise = self.noise_multiplier * self.clipping_norm
        size = noise / (asked * STATISTICS_SCALE)
        still = self._local | facts.phase.frozen
        moving = Part.STATISTICS not in still and any(facts.parts.moments())
        if size > _NOISY and moving:
            logger.warning(
                "in each round, the noise in BN's running variances is %.2g times as"
                " large as the variances (z C / (m s)), so the variances are useless. Use"
                " a smaller dp-clipping-norm, more clients, or a method that does not"
                " send statistics (fedbn, silobn, or fixbn with an early freeze-at).",
                size,
            )

    def _release(self, report: RoundReport) -> None:
        """Note the release of this round and report its cost."""
        self.accountant.add(self.noise_multiplier)
        report.privacy = {
            "clipping-norm": self.clipping_norm,
            "noise-multiplier": self.noise_multiplier,
            **self._cost(),
        }
        if self.guarantees:
            logger.info("%s", self.guarantee())

    def _cost(self) -> dict[str, float]:
        """Return epsilon and delta, or nothing without a guarantee."""
        if not self.guarantees:
            return {}
        return {"epsilon": self.accountant.epsilon(), "delta": self.settings.dp_delta}

    @property
    def guarantees(self) -> bool:
        """Whether there are releases, all with noise."""
        accountant = self.accountant
        return bool(accountant.releases) and math.isfinite(accountant.epsilon())

    def guarantee(self) -> str:
        """Return the guarantee in one sentence."""
        settings, accountant = self.settings, self.accountant
        if not self.noise_multiplier:
            return "No privacy is guaranteed: updates are clipped, without noise."
        if not accountant.releases:
            return NO_ROUND
        epsilon = accountant.epsilon()
        if not math.isfinite(epsilon):
            return "No privacy is guaranteed: there were releases without noise."
        return (
            f"epsilon = {epsilon:.4g} at delta = {settings.dp_delta:g} after"
            f" {len(accountant.releases)} releases: the models hide whether a client's"
            " update is in the sums."
        )

    def outcome(self) -> dict[str, Any]:
        """Return the entries for the summary of a run."""
        entries = {
            "guarantee": self.guarantee(),
            "noise-multiplier": self.noise_multiplier,
            **self._cost(),
        }
        return {"privacy": entries}

    def state_dict(self) -> dict[str, Any]:
        """Return the releases."""
        return {"releases": [*self.accountant.releases]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the releases."""
        self.accountant.restore(state["releases"])
