"""Recording a run: test the global model and write a line each round; write model, curves and summary at the end."""

from __future__ import annotations

import functools
import json
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, MetricRecord
from torch import nn

from fedbn_flwr.batchnorm.adaptation import TestBN, evaluate_adapted, try_batches
from fedbn_flwr.batchnorm.averaging import State
from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.client.saved_state import ABSENT, AVERAGED, KEPT_HASHES, why_absent
from fedbn_flwr.client.state_folder import StateFolder
from fedbn_flwr.experiment.config import STATE_IN_OUT, Config, state_in_out
from fedbn_flwr.experiment.data.held_out import HeldOut
from fedbn_flwr.experiment.data.partitioned_data import PartitionedData
from fedbn_flwr.experiment.early_stopping import EarlyStopping
from fedbn_flwr.experiment.files import read_metrics
from fedbn_flwr.experiment.output.definitions import CLIENTS, HELD_OUT, definitions
from fedbn_flwr.experiment.output.folder import DIVERGED_AT, RunFolder, versions
from fedbn_flwr.experiment.output.model_description import MODEL_DESCRIPTION, ModelDescription
from fedbn_flwr.messages.protocol import (
    DROPPED_BATCHES,
    EXAMPLES_PROCESSED,
    KEPT,
    NUM_EXAMPLES,
    TRAIN_ACCURACY,
    TRAIN_LOSS,
    VALIDATION,
)
from fedbn_flwr.messages.records import from_record, state_sha256, tensors, to_state
from fedbn_flwr.server.failures import losses_not_finite
from fedbn_flwr.server.method import RECALIBRATED, TEST_BN
from fedbn_flwr.server.report import RoundReport, Traffic
from fedbn_flwr.server.shared_bn import SHARED_BN
from fedbn_flwr.strategies import FedAvg
from fedbn_flwr.training.tasks import Task
from fedbn_flwr.training.wrappers import load_state

__all__ = ["GLOBAL_TESTS", "OnRound", "Recorder", "headlines"]

logger = logging.getLogger("flwr")

OnRound = Callable[[Mapping[str, Any]], None]
"""Called with each line of ``metrics.jsonl``."""

_COMPLETED = (SHARED_BN, RECALIBRATED)  # tests of the global model with some BN entries replaced
GLOBAL_TESTS = {"global": "test", "global-batch-statistics": "test-batch"}
GLOBAL_TESTS |= {name: f"test-{name}" for name in (*_COMPLETED, f"global{TEST_BN}", f"{SHARED_BN}{TEST_BN}")}
"""Each test of the global model, and the prefix of its metrics."""

REFUSED = "a reply was refused; the server's log has the reason"
_COUNTED = ("examples", "exchanges", "bytes-down", "bytes-up", "counter-bytes-down", "counter-bytes-up")

_WHAT_MEAN = " (mean over clients)"


class Recorder:
    """Tests the global model if ``eval-on`` asks for it, and writes a line for each round.

    Attributes:
        stopping: the validation scores, with which it stops the strategy; None without early stopping.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: Config,
        model: nn.Module,
        data: PartitionedData | None,
        strategy: FedAvg[Any] | None,
        on_round: OnRound | None,
    ) -> None:
        self._folder, self._config, self._model = folder, config, model
        self._strategy, self._on_round = strategy, on_round
        self._model_description = ModelDescription.of(config, data.dataset if data else None)
        if strategy and (scale := strategy.input_scale):
            self._model_description = replace(self._model_description, mean=scale.mean, std=scale.std)
        self._test, self._task = ((data.test_view() if data else None) or None), config.learning_task()
        self._validation = data.validation_view() if data else None
        self._withheld = strategy is not None and not strategy.protection.publishes_metrics
        self._held_out = HeldOut(data, self._task, config.test_bn_settings()) if data and data.held_out else None
        self._domains = data.domain_views() if data and not self._withheld else {}
        self._domain_of = functools.cache(data.domain_of) if data and self._domains else lambda client: None
        untrained = [name for name in config.evaluations() if name.startswith("global")]
        if strategy and untrained and strategy.local:
            logger.warning(
                "eval-on=%s tests the model of the server, and strategy %r keeps %s with its clients: these entries "
                "have their initial values, which are not trained. eval-on=averaged-bn tests with the average of the "
                "clients' values.",
                ",".join(untrained),
                strategy.name,
                ", ".join(sorted(strategy.local)),
            )
        self._try_batches()
        lines = read_metrics(folder.path / "metrics.jsonl")  # of a resumed run
        self.stopping = EarlyStopping(config, lines) if config.early_stopping else None
        self._stop()
        self._trained = {str(client) for line in lines for client in line["participants"]}
        self._clock = time.monotonic()

    def after_round(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Write the line of a round; Flower's ``evaluate_fn``, called with round 0 before the first round."""
        if server_round == 0 or self._strategy is None:
            self._clock = time.monotonic()
            return None
        state = from_record(arrays) if self._due(server_round) else None
        line = self.write(self._strategy.run.report, state)
        found = {name: line[f"test-{name}"] for name in self._task.metrics if f"test-{name}" in line}
        return MetricRecord(found) if found else None

    def write(self, report: RoundReport, state: State | None = None) -> dict[str, Any]:
        """Test in a round with a test, write and return the line of the round, and call ``on_round`` with it."""
        line: dict[str, Any] = {"round": report.server_round, "phase": report.phase}
        reported = self._strategy.every("reported_metrics") if self._strategy else []
        for key in (TRAIN_LOSS, TRAIN_ACCURACY, *reported):
            if key in report.metrics:
                line[key] = report.metrics[key]
        due = self._due(report.server_round)
        tested = self._tested(state) if due else {}
        line |= tested
        if due or self._strategy is None:  # a strategy notes the losses of training itself
            self._note_divergence(report, tested)
        if due and self._held_out:
            own = to_state(self._model.state_dict())
            whole = state if state is not None else {name: array.copy() for name, array in own.items()}
            line |= self._held_out.test(self._model, whole, self._strategy)
            load_state(self._model, tensors(whole))
        self._trained |= {str(client) for client in report.participants}
        line |= _personal(report, self._trained, self._task)
        domains = line.pop("domains", {}) | _personal_domains(report, self._domain_of, self._task)
        clients = report.clients.values() or [report.metrics]
        if not self._withheld:
            line["examples"] = int(sum(client.get(EXAMPLES_PROCESSED, 0) for client in clients))
            line[DROPPED_BATCHES] = int(sum(client.get(DROPPED_BATCHES, 0) for client in clients))
        line |= {"participants": report.participants, **_moved(report.train), **report.privacy}
        if report.evaluate.exchanges:
            line |= _moved(report.evaluate, "evaluation-")
        if report.evaluations:
            line["clients"] = report.evaluations
        if unseen := sorted(report.evaluations.keys() - self._trained):
            line["unseen"] = unseen
        if domains:
            line["domains"] = domains
        line["seconds"] = round(time.monotonic() - self._clock, 4)
        line["rejected"] = [REFUSED] * len(report.rejected) if self._withheld else list(report.rejected.values())
        if report.kept_previous:
            line["kept-previous"] = True
        if report.diverged:
            line |= {DIVERGED_AT: report.diverged_at, "diverged": report.diverged}
        self._clock = time.monotonic()
        self._folder.add_round(line)
        if self.stopping:
            self.stopping.add(line)
            self._stop()
        names = (*headlines(self._config), TRAIN_LOSS)
        shown = " ".join(f"{k} {line[k]:.4f}{_WHAT_MEAN * k.startswith('personal')}" for k in names if k in line)
        logger.info("round %d/%d: %s", report.server_round, self._config.num_server_rounds, shown)
        if self._on_round:
            self._on_round(line)
        return line

    def _stop(self) -> None:
        """End the run if early stopping says so."""
        if self._strategy and self.stopping and self.stopping.stops:
            self._strategy.stopped = True
            logger.info("early stopping: %s was best in round %s", self.stopping.metric, self.stopping.best())

    def _note_divergence(self, report: RoundReport, tested: Mapping[str, Any]) -> None:
        if self._strategy:
            self._strategy.note_divergence(losses_not_finite({"": tested}))
        elif losses := losses_not_finite({"": {**report.metrics, **tested}}):
            report.diverged, report.diverged_at = losses, report.server_round
            logger.error("round %d diverged: %s", report.server_round, "; ".join(losses))

    def _tested(self, state: State | None) -> dict[str, Any]:
        """Return the tests of ``eval-on`` with the global model, on the whole test set and each domain's.

        The first one is done on the validation examples of all clients, too.

        ``state`` is loaded into the model first; None = the model is up to date.
        """
        line: dict[str, Any] = {}
        domains: dict[str, dict[str, float]] = {}
        if self._test is None:
            return line
        for name in (name for name in self._config.evaluations() if name in GLOBAL_TESTS):
            completed = name.removesuffix(TEST_BN)
            entries = self._strategy.completion(completed) if self._strategy else {}
            if completed in _COMPLETED and not entries:
                continue  # no statistics were re-estimated or shared; the log gives the reason
            if state is not None:
                load_state(self._model, tensors({**state, **entries}))
            prefix = GLOBAL_TESTS[name] + "-"
            test = functools.partial(evaluate_adapted, self._model, by=self._statistics(name), task=self._task)
            line |= test(self._test).named(prefix)
            if self._validation and name == self._config.evaluations()[0]:
                line |= test(self._validation).named(f"{VALIDATION}-")
            if self._domains:
                found = {domain: test(view).named(prefix) for domain, view in self._domains.items()}
                for metric in (prefix + name for name in self._task.metrics):
                    domains[metric] = {domain: metrics[metric] for domain, metrics in found.items()}
        return {**line, "domains": domains} if domains else line

    def _statistics(self, test: str) -> TestBN | None:
        """Return the BatchNorm statistics of a test of the global model; None = the running ones."""
        if test == "global-batch-statistics":
            return TestBN("batch")
        return self._config.test_bn_settings() if test.endswith(TEST_BN) else None

    def _try_batches(self) -> None:
        """Refuse now, before the first round, tests in which a batch is too small for its own statistics.

        Raises:
            NormLayerError: a layer gets one value per channel.
        """
        first = self._config.evaluations()[0]
        for name in (name for name in self._config.evaluations() if name in GLOBAL_TESTS):
            for view in (self._test, self._validation if name == first else None, *self._domains.values()):
                if view is not None:
                    try_batches(self._model, view, self._statistics(name), self._task)
        if self._held_out:
            self._held_out.try_batches(self._model)

    def finish(self, state: State, strategy: FedAvg[Any] | None, resumed_after: Sequence[int] = ()) -> dict[str, Any]:
        """Write model, curves and summary; return the summary.

        With early stopping, ``state`` and the strategy are those of the best round.
        """
        lines = read_metrics(self._folder.path / "metrics.jsonl")
        headline = headlines(self._config)[0]
        measured = [line for line in lines if line.get(headline) is not None]
        choose = max if self._task.higher_is_better else min
        best = choose(measured, key=lambda line: line[headline], default={})
        kept_round = self.stopping.best() if self.stopping else None
        last = lines[kept_round - 1] if kept_round else measured[-1] if measured else {}
        kept = ("train-", "test-", "personal-", f"{VALIDATION}-", HELD_OUT, "domains")
        final = {k: v for k, v in last.items() if k == "round" or k.startswith(kept)}
        summary: dict[str, Any] = {
            "strategy": strategy.name if strategy else self._config.strategy,
            "headline": headline,
            "final": final,
            "definitions": definitions(
                final,
                last,
                len(self._test or ()),
                strategy is not None,
                self._config.test_bn_settings(),
                self._model_description.positive,
            ),
            "best": {"round": best.get("round"), headline: best.get(headline)},
            "rounds": len(lines),
            "ledger": _totals(lines),
            "seconds": round(sum(line["seconds"] for line in lines), 3),
            "rejected": sum(len(line["rejected"]) for line in lines),
        }
        if since := next((line[DIVERGED_AT] for line in lines if DIVERGED_AT in line), None):
            summary[DIVERGED_AT] = since
        if self.stopping:
            best_score = {"round": kept_round, self.stopping.metric: last.get(self.stopping.metric)}
            early = self.stopping.stops and len(lines) < self._config.num_server_rounds
            summary |= {"stopped-early": early, "best-validation": best_score}
        summary |= strategy.outcome(kept_round or len(lines)) if strategy else {}
        if resumed_after:
            summary["resumed-after"] = list(resumed_after)
        private = strategy is not None and strategy.protection.hides_clients
        local = strategy.run.local_hashes if strategy and not private else {}
        summary |= {"sha256": state_sha256(state, local), "seed": self._config.seed, "versions": versions()}
        about = _contents(strategy)
        summary["model"] = about
        absent = [part for part, text in about.items() if text == ABSENT]
        clients = self._folder.save_clients(
            _kept_by_clients(self._config, strategy, state) if strategy and not private else ()
        )
        if strategy and absent:
            summary["model-note"] = why_absent(absent, clients)
            logger.info("%s", summary["model-note"])
            state = {name: array for name, array in state.items() if strategy.run.parts.part_of[name] not in absent}
        more = {
            "sha256": summary["sha256"],
            MODEL_DESCRIPTION: self._model_description.to_json(),
        }  # what using the model elsewhere needs
        more |= {KEPT_HASHES: json.dumps(dict(sorted(local.items())))} if strategy and strategy.local and local else {}
        more |= {DIVERGED_AT: str(since)} if since and (kept_round or len(lines)) >= since else {}
        self._folder.finish(state, {"format": "pt", **about, **more}, summary)
        return summary

    def close(self) -> None:
        """Move the test model to the CPU, to free the device's memory."""
        self._model.cpu()

    def _due(self, server_round: int) -> bool:
        return server_round % self._config.eval_every == 0 or server_round == self._config.num_server_rounds


def _moved(traffic: Traffic, prefix: str = "") -> dict[str, int]:
    values = (traffic.exchanges, traffic.down, traffic.up, traffic.counters_down, traffic.counters_up)
    return {prefix + key: value for key, value in zip(_COUNTED[1:], values, strict=True)}


def _totals(lines: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    counted = [(k, v) for line in lines for k, v in line.items() if k.removeprefix("evaluation-") in _COUNTED]
    totals: dict[str, int] = {}
    for key, value in counted:
        totals[key] = totals.get(key, 0) + value
    return totals


def headlines(config: Config) -> list[str]:
    """Return the key of the main score of each test in ``eval-on``; the first one is the run's main metric."""
    score = config.learning_task().score
    return [f"{GLOBAL_TESTS.get(name, name)}-{score}" for name in config.evaluations()]


def _personal(report: RoundReport, trained: Collection[str], task: Task) -> dict[str, float]:
    """Return each metric of the clients' tests: its plain mean over the clients (arXiv:2301.02982, 6.2.1) and others.

    ``NAME`` is the plain mean, ``NAME-weighted`` the mean weighted by the clients' test examples. ``NAME-seen`` is the
    plain mean over the clients that have trained in this run, ``NAME-unseen`` over the others. A client whose test set
    does not define the metric is left out; if there is one, ``NAME-clients`` is the number of the others.
    """
    values: dict[str, list[tuple[float, float, bool]]] = {}  # value, test examples, has trained
    undefined: set[str] = set()
    for client, metrics in report.evaluations.items():
        for name in ("own", "global", VALIDATION):
            for what in dict.fromkeys(("accuracy", "loss", *task.metrics)):
                count = metrics.get(f"{name}-{NUM_EXAMPLES}", 0)
                if f"{name}-{what}" in metrics and count > 0:
                    key, value = f"personal-{name}-{what}", metrics[f"{name}-{what}"]
                    found = values.setdefault(key, [])
                    if math.isnan(value) and math.isfinite(metrics.get(f"{name}-loss", 0.0)):
                        undefined.add(key)
                    else:  # NaN with such a loss: the model diverged
                        found.append((value, count, client in trained))
    line: dict[str, float] = {}
    for key, found in values.items():
        if key in undefined:
            line[key + CLIENTS] = len(found)
        if not found:
            line[key] = math.nan
            continue
        line[key] = _mean([value for value, _, _ in found])
        line[f"{key}-weighted"] = sum(value * count for value, count, _ in found) / sum(n for _, n, _ in found)
        for suffix, wanted in (("seen", True), ("unseen", False)):
            if group := [value for value, _, seen in found if seen == wanted]:
                line[f"{key}-{suffix}"] = _mean(group)
    return line


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _personal_domains(
    report: RoundReport, domain_of: Callable[[int], str | None], task: Task
) -> dict[str, dict[str, float]]:
    """Return the plain mean, over the clients of each domain, of each metric on their own test data."""
    tests: dict[str, list[Mapping[str, Any]]] = {}
    for client, metrics in report.evaluations.items():
        if metrics.get(f"own-{NUM_EXAMPLES}", 0) > 0 and (domain := domain_of(int(client))):
            tests.setdefault(domain, []).append(metrics)
    found: dict[str, dict[str, float]] = {}
    for name in task.metrics if tests else ():
        values = {domain: [m[f"own-{name}"] for m in own] for domain, own in tests.items()}
        defined = {domain: [n for n in numbers if not math.isnan(n)] for domain, numbers in values.items()}
        found[f"personal-own-{name}"] = {d: _mean(defined[d] or numbers) for d, numbers in values.items()}
    return found


def _contents(strategy: FedAvg[Any] | None) -> dict[str, str]:
    """Return the content of each part of ``model.safetensors``: its metadata, and ``model`` of the summary."""
    about = {part.value: "global" for part in Part}
    if strategy:
        averaged = strategy.completion(SHARED_BN)
        kept = {part for part in strategy.local if strategy.run.parts.select([part])}
        about |= dict.fromkeys(kept, AVERAGED if averaged else ABSENT)
        if strategy.recalibrates and strategy.run.reestimated:
            about[Part.STATISTICS.value] = "re-estimated from the clients' data under these weights"
            if about[Part.COUNTERS.value] == ABSENT:
                about[Part.COUNTERS.value] = "initial values"  # a model with statistics is whole with them
    return about


def _kept_by_clients(config: Config, strategy: FedAvg[Any], model: State) -> Iterator[tuple[str, State]]:
    """Yield (client, entries) of each client whose part of the model lies on this disk, as the run left it."""
    if not strategy.local or strategy.continuity is None or not config.state_dir:
        return
    fingerprint = strategy.run.parts.fingerprint({name: array.shape for name, array in model.items()})
    root = state_in_out(config) if config.state_dir == STATE_IN_OUT else Path(config.state_dir)
    for client, sha256 in strategy.run.local_hashes.items():
        folder = StateFolder(root, strategy.continuity, int(client), fingerprint)
        if (content := folder.look_up(sha256)) and KEPT in content["kept"]:
            yield client, content["kept"][KEPT]
