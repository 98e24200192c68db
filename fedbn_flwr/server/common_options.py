"""The options of every method: momentum between rounds, gradient clipping, re-estimated statistics, shared BN parts.

They are the fields of ``server.params.Params``. This class asks the clients for what the options need, and refuses
options, tests and models that do not fit together. The methods are in ``strategies``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from fedbn_flwr.batchnorm.averaging import State, check_state
from fedbn_flwr.batchnorm.parts import Part, Parts
from fedbn_flwr.errors import ConfigError, NormLayerError
from fedbn_flwr.messages.protocol import Key
from fedbn_flwr.server.flower import Server
from fedbn_flwr.server.gradient_clipping import AGC, ClipGradients
from fedbn_flwr.server.method import HookFactory, Misfit, Need, P, RunSettings
from fedbn_flwr.server.momentum import MOMENTUM, SCOPE, MomentumBuffers, average_buffers
from fedbn_flwr.server.params import RECALIBRATED, tests_in
from fedbn_flwr.server.replies import Reply, refuse_misshapen
from fedbn_flwr.server.shared_bn import SHARED_BN, ShareBN

__all__ = ["CommonOptions"]

logger = logging.getLogger("flwr")

_WORDS = {
    Part.AFFINE: ("gamma and beta", "affine=False"),
    Part.STATISTICS: ("running statistics", "track_running_stats=False"),
}
_NOT_BY_NAMES = (
    "none that the names of its arrays show (BatchNorm without running statistics is found only with "
    "parts=split_state(model))"
)


class CommonOptions(Server[P]):
    """A method's server with the options of every method.

    Attributes:
        momentum: the averaged momentum of the clients' SGD by entry, with ``momentum_scope="global"``.
    """

    client_hooks: ClassVar[Mapping[str, HookFactory]] = {
        MOMENTUM: lambda context: MomentumBuffers(context.config[SCOPE], context.local_entries),
        "agc": lambda context: ClipGradients(float(context.config[AGC])),
        "share-bn": lambda context: ShareBN(context.local_entries),
    }
    implicit_hooks = frozenset({"share-bn"})  # a client may leave it out
    keys: ClassVar[tuple[Key, ...]] = (MOMENTUM, SCOPE, AGC, SHARED_BN)
    checkpoint_keys: ClassVar[tuple[str, ...]] = ("momentum",)

    momentum: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.momentum = {}
        if problems := self._test_conflicts(self.params, self.tests):
            raise ConfigError("\n".join(problems))

    @classmethod
    def conflicts(cls, params: P, run: RunSettings) -> list[str]:
        """Return why these settings cannot be used in such a run, one line each."""
        problems = cls._test_conflicts(params, run.tests)
        if run.norm == "batch-renorm" and cls.batch_renorm_conflict:
            problems.append(f"{cls.name} {cls.batch_renorm_conflict}")
        if params.momentum_scope != "none" and run.optimizer != "sgd":
            problems.append(
                f"momentum-scope={params.momentum_scope} keeps SGD's momentum, and optimizer={run.optimizer} has none: "
                "its moments start at zero in each round. Use optimizer=sgd or momentum-scope=none"
            )
        elif params.momentum_scope != "none" and not run.sgd_momentum:
            problems.append(f"momentum-scope={params.momentum_scope} needs sgd-momentum above 0")
        if params.agc and run.gradient_clip_norm:
            problems.append(
                f"agc={params.agc} and gradient-clip-norm={run.gradient_clip_norm} both limit gradients; set one to 0"
            )
        return problems

    @classmethod
    def unused(cls, params: P, run: RunSettings) -> dict[str, str]:
        """Return the settings that have no effect under the other settings, each with what it needs."""
        averages = Part.STATISTICS not in cls.local or SHARED_BN in run.tests
        return {} if averages else {"variance": f"{cls.name} averages no running variances"}

    @classmethod
    def needs(cls, params: P) -> list[Need]:
        """Return what the method keeps with its clients, and the statistics that are re-estimated."""
        who, statistics = f"strategy {cls.name!r}", frozenset({Part.STATISTICS})
        needs = [Need(who, "FedAvg", cls.local - {Part.REST})] if cls.needs_batchnorm else []
        if cls.needs_statistics or cls.reestimates:
            needs.append(Need(who, "FedAvg", statistics))
        if params.recalibrate:
            needs.append(Need("recalibrate=true", "recalibrate=false", statistics))
        if RECALIBRATED in tests_in(params.eval_on):
            needs.append(Need(f"eval-on={RECALIBRATED}", f"eval-on without {RECALIBRATED}", statistics))
        return needs

    @classmethod
    def misfits(cls, params: P, parts: Parts, shapes: Mapping[str, tuple[int, ...]]) -> list[Misfit]:
        """Return why the model's BatchNorm layers do not fit."""
        misfits = []
        for who, instead, wanted in cls.needs(params):
            if not parts.layers:
                has = _NOT_BY_NAMES if parts.by_names else ""
                misfits.append(Misfit(f"{who} needs BatchNorm", has, f"{instead}, or a model with BatchNorm"))
            elif wanted and not parts.select(wanted):
                words, reasons = zip(*(words for part, words in _WORDS.items() if part in wanted), strict=True)
                kind = f"BatchNorm with {' or '.join(words)}"
                has = f"{parts.named_layers()} without ({', '.join(reasons)})"
                misfits.append(Misfit(f"{who} needs {kind}", has, f"{instead}, or a model with {kind}"))
        return list(dict.fromkeys(misfits))

    @classmethod
    def _test_conflicts(cls, params: P, tests: Sequence[str]) -> list[str]:
        """Return why tests have no model under this method, one line each."""
        problems = []
        bn_parts, weights = cls.local - {Part.REST}, cls.local & {Part.AFFINE, Part.REST}
        if (params.recalibrate or RECALIBRATED in tests) and weights:
            problems.append(
                f"strategy {cls.name!r} keeps {' and '.join(sorted(weights))} with its clients: there are no global "
                "weights under which statistics could be re-estimated (recalibrate, eval-on=recalibrated)."
            )
        if Part.REST in cls.local and (asked := [name for name in tests if name.startswith("global")]):
            problems.append(
                f"eval-on={','.join(asked)} tests a global model, and strategy {cls.name!r} has none: its clients "
                "share nothing, and the initial model would be tested. Use personal-own or personal-global."
            )
        if SHARED_BN in tests and (not bn_parts or Part.REST in weights):
            problems.append(
                f"eval-on={SHARED_BN} completes a global model with the average of BN parts that stay with the "
                f"clients; strategy {cls.name!r} has no such model. It is for fedbn, silobn and mtfl."
            )
        return problems

    @classmethod
    def extra_copies(cls, params: P) -> int:
        """Return one copy for momentum that the server averages."""
        return int(params.momentum_scope == "global")

    def beside_updates(self) -> dict[str, str]:
        """Return what the settings take from a client beside its update."""
        texts = {}
        if Part.REST in self.local:
            texts["nothing"] = "its clients share nothing, so there is nothing to protect"
        if self.params.momentum_scope == "global":
            texts["buffers"] = "momentum-scope=global sends SGD's momentum beside the model; use none or local"
        if self.params.variance == "pooled":
            texts["variance"] = "variance=pooled adds the spread of the clients' means; use variance=mean"
        if self.recalibrates or RECALIBRATED in self.tests:
            what = f"strategy={self.name}" if self.reestimates else "recalibrate=true or eval-on=recalibrated"
            texts["statistics"] = f"{what} collects statistics that are re-estimated on the clients' data"
        if SHARED_BN in self.tests:
            texts["shared-bn"] = f"eval-on={SHARED_BN} collects the BN parts that stay with the clients"
        return texts

    def begin(self) -> None:
        """Check that the model fits; warn of settings that do not fit the number of rounds; start without momentum.

        Raises:
            NormLayerError: the model lacks layers that the method needs; the error names them, and what to use.
        """
        self.momentum = {}
        if misfits := self.misfits(self.params, self.run.parts, self.run.shapes):
            lines = [f"{need}; the model has {has or 'none'}. Use {remedy}." for need, has, remedy in misfits]
            raise NormLayerError("\n".join(lines))
        for line in self.warnings(self.params, RunSettings(self.run.num_rounds)) if self.run.num_rounds else ():
            logger.warning("%s", line)

    def hooks_for(self, server_round: int) -> dict[str, dict[str, Any]]:
        """Send the scope of momentum and the strength of AGC; ask for BN parts if a test averages them."""
        scope = self.params.momentum_scope
        hooks: dict[str, dict[str, Any]] = {} if scope == "none" else {MOMENTUM: {SCOPE: scope}}
        if self.params.agc:
            hooks["agc"] = {AGC: self.params.agc}
        return {**hooks, "share-bn": {}} if SHARED_BN in self.tests else hooks

    def extras(self, server_round: int) -> Mapping[str, State]:
        """Send the averaged momentum, and an empty record for shared BN parts."""
        sent: dict[str, State] = {MOMENTUM: self.momentum} if self.params.momentum_scope == "global" else {}
        return {**sent, SHARED_BN: {}} if SHARED_BN in self.tests else sent

    def check(self, server_round: int, reply: Reply, before: State) -> None:
        """Refuse a reply whose momentum or shared BN parts do not fit the model."""
        refuse_misshapen(MOMENTUM, reply.extras.get(MOMENTUM, {}), self.run.shapes)
        if shared := reply.extras.get(SHARED_BN):
            local = self.run.parts.select(self.local)
            check_state(shared, {name: before[name] for name in local}, self.run.parts)

    def average_momentum(self, replies: Sequence[Reply]) -> None:
        """Average the momentum of the replies, with the weights of the method, if its scope is global."""
        if self.params.momentum_scope == "global":
            sent = [reply.extras.get(MOMENTUM, {}) for reply in replies]
            self.momentum = average_buffers(sent, self.weights(replies))
