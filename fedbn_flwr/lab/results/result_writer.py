"""The record of a federated run: its tests, lines, checkpoints and results.

The strategy calls ``test`` with the model of each round, and ``end_round`` at the end of
the round. After the last round, ``finish`` writes model and summary.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result
from torch import nn

from fedbn_flwr.batchnorm.array_types import State
from fedbn_flwr.client.personal_model import (
    ABSENT,
    BEFORE_TESTS,
    KEPT_HASHES,
    why_absent,
)
from fedbn_flwr.errors import DivergedError, NothingTrainedError
from fedbn_flwr.lab.config import Config, data_of
from fedbn_flwr.lab.data import Subset
from fedbn_flwr.lab.early_stopping import EarlyStopping
from fedbn_flwr.lab.partitioned.counts import names_of
from fedbn_flwr.lab.partitioned.partitioned_data import PartitionedData
from fedbn_flwr.lab.results.checkpoint import Checkpoints
from fedbn_flwr.lab.results.columns import facts_of_columns
from fedbn_flwr.lab.results.files import COUNTED, command, ledger_of, read_metrics
from fedbn_flwr.lab.results.folder import DIVERGED_AT, RunFolder, extra
from fedbn_flwr.lab.results.own_models import tested_models
from fedbn_flwr.lab.results.predictions import save_predictions
from fedbn_flwr.lab.results.summary import (
    MODEL_DESCRIPTION,
    ModelDescription,
    contents_of_model,
    kept_by_clients,
    versions,
)
from fedbn_flwr.lab.results.tester import Tester, enough_examples, headlines
from fedbn_flwr.lab.results.tests_table import (
    HELD_OUT,
    Measured,
    in_line,
    key_of,
    of_clients,
    own_score,
    read_tests,
    site_name,
)
from fedbn_flwr.messages.protocol import (
    DROPPED_BATCHES,
    EXAMPLES_PROCESSED,
    TRAIN_ACCURACY,
    TRAIN_LOSS,
    VALIDATION,
)
from fedbn_flwr.messages.records import (
    Traffic,
    from_record,
    state_sha256,
    to_record,
)
from fedbn_flwr.server.runs.failures import divergence, nothing_trained, shortened
from fedbn_flwr.server.runs.round_report import RoundReport
from fedbn_flwr.strategies import Strategy

logger = logging.getLogger("flwr")

OnRound = Callable[[Mapping[str, Any]], None]
"""Called with each line of ``metrics.jsonl``."""

REFUSED = "a reply was refused; the server's log has the reason"


class ResultWriter:
    """Tests the global model, and writes lines, checkpoints and results.

    ``Strategy.start`` gets the method ``test`` as ``evaluate_fn``, and ``open`` sets
    ``end_round`` as ``on_round_end``.

    Args:
        folder: the run's folder.
        config: the resolved config.
        model: receives the entries of each test.
        data: the data of the run, or None if the data are not on this machine.
        strategy: the run's strategy.
        checkpoints: the checkpoints that follow the strategy.
        on_round: called with each line.

    Attributes:
        stopping: the validation scores that determine the end of the run; None without
            early stopping.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: Config,
        model: nn.Module,
        data: PartitionedData | None,
        strategy: Strategy,
        checkpoints: Checkpoints,
        on_round: OnRound | None,
    ) -> None:
        self._checkpoints = checkpoints
        self._folder = folder
        self._config = config
        self._model = model
        self._data = data
        self._strategy = strategy
        self._on_round = on_round
        self._task = data_of(config).test_task
        # the scores that the log shows; early stopping and results use the first
        self._headlines = headlines(config)
        dataset = data.dataset if data else None
        self._model_description = ModelDescription.of(config, dataset)
        # A protection may forbid results that reveal single clients or few clients.
        self._withheld = not strategy.protection.publishes_metrics

        domains: dict[str, Subset] = {}
        self._names: dict[str, str] = {}
        self._domain_of: Callable[[int], str | None] = lambda client: None
        self._enough: Callable[[Measured], bool] = lambda test: True
        if data and not self._withheld:
            self._names = names_of(data)
            self._enough = enough_examples(data, self._task)
            domains = data.domain_views()
            if domains:
                self._domain_of = functools.cache(data.domain_of)
        self._tester = Tester(config, model, data, domains, strategy)

        # Read the scores of earlier rounds, because a resumed run may already be at its
        # end.
        self.stopping: EarlyStopping | None = None
        if config.early_stopping:
            self.stopping = EarlyStopping(config, self.lines())
        self._note_stop()

        # the results of ``test`` in this round, until the line of the round is written
        self._tested: list[Measured] = []
        self._start_clock()

    @contextmanager
    def open(self) -> Iterator[None]:
        """Record the rounds in the block, even if an error or a signal ends them."""
        self._strategy.on_round_end = self.end_round
        try:
            yield
            self._checkpoints.after_run(self.stopping)
        except (KeyboardInterrupt, SystemExit):
            # A signal ends a run in the middle of a round. The run resumes after the
            # last complete round.
            self._checkpoints.on_signal(self.stopping)
            raise
        finally:
            # The function refers to the run's data and model. Moving the test model to
            # the CPU frees the memory of the device.
            self._strategy.on_round_end = None
            self._model.cpu()

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of all rounds so far."""
        return read_metrics(self._folder.path / "metrics.jsonl")

    def _start_clock(self) -> None:
        """Start to measure the seconds of a round."""
        self._clock = time.monotonic()

    def test(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Test the global model if this round has a test, and return the metrics.

        Args:
            server_round: the round.
            arrays: the global model.
        """
        # A new run asks for a test before round 1. Save the beginning instead, so that
        # a run that is killed in round 1 can be resumed.
        if server_round == 0:
            self._checkpoints.after_round(0)
            self._start_clock()
            return None
        self._tested = []
        if not self._due(server_round):
            return None
        self._tested = self._tester.after_round(server_round, from_record(arrays))
        # A non-finite loss at a client that never trains does not end the run.
        metrics = in_line(test for test in self._tested if test.part != HELD_OUT)
        return MetricRecord(metrics) if metrics else None

    def end_round(
        self,
        server_round: int,
        arrays: ArrayRecord,
        metrics: Mapping[str, MetricRecord],
    ) -> None:
        """Write the line of a round, and then its checkpoint if one is due."""
        # Write the checkpoint last: a resume can remove lines after its checkpoint, but
        # cannot write missing lines.
        self._write(self._strategy.run.report)
        self._checkpoints.after_round(server_round, self.stopping)

    def _write(self, report: RoundReport) -> None:
        """Write the line of a round, and call ``on_round`` with it."""
        # Add the measurements of the training, of the server's tests and of the
        # clients' tests.
        line: dict[str, Any] = {"round": report.server_round, "phase": report.phase}
        reported = self._strategy.methods.reported_metrics
        measured = (TRAIN_LOSS, TRAIN_ACCURACY, *reported)
        line |= {key: report.metrics[key] for key in measured if key in report.metrics}
        names = self._site_names()
        evaluations = of_clients(report.server_round, report.evaluations, names)
        tests = [*self._tested, *evaluations]
        line |= in_line(tests, self._domain_of, self._enough)

        # Add the costs of the round.
        line |= self._counted(report)
        line["seconds"] = round(time.monotonic() - self._clock, 4)

        # Add the failures. Withhold their reasons if a protection withholds results,
        # because a reason may reveal a client's data.
        line["rejected"] = list(report.rejected.values())
        if self._withheld:
            line["rejected"] = [REFUSED] * len(report.rejected)
        elif report.missing or report.rejected:
            line["missing"] = {
                site_name(client, names): reason
                for client, reason in self._missing(report).items()
            }
        if report.kept_previous:
            line["kept-previous"] = True
        if report.diverged:
            line |= {DIVERGED_AT: report.diverged_at, "diverged": report.diverged}
        self._start_clock()
        # Write the tests first: they count when the line of their round is there.
        self._folder.add_tests(tests)
        self._add(line, report.absences(names))

    def _missing(self, report: RoundReport) -> dict[str, str]:
        """Return by client the reason why the round has no usable reply of the client."""
        reasons = dict.fromkeys(report.missing, "not connected")
        for node_id, reason in report.reasons.items():
            client = self._strategy.run.nodes.node(node_id).label
            # The test of a client that trained may fail.
            if client not in report.clients:
                reasons[client] = shortened(reason)
        return reasons

    def _site_names(self) -> Mapping[str, str]:
        """Return the names of the sites by client: those of nodes, or of the data."""
        return self._names | self._strategy.run.nodes.names

    def _counted(self, report: RoundReport) -> dict[str, Any]:
        """Return the numbers of a round: examples, clients, traffic, spent privacy."""
        counted: dict[str, Any] = {}
        clients = report.clients.values()
        if not self._withheld:
            examples = sum(client.get(EXAMPLES_PROCESSED, 0) for client in clients)
            dropped = sum(client.get(DROPPED_BATCHES, 0) for client in clients)
            counted["examples"] = int(examples)
            counted[DROPPED_BATCHES] = int(dropped)
        counted["participants"] = report.participants
        counted |= _moved(report.train)
        counted |= report.privacy
        if report.evaluate.exchanges:
            counted |= _moved(report.evaluate, "evaluation-")
        return counted

    def _add(self, line: dict[str, Any], absences: str) -> None:
        """Write and log the line of a round. Pass it to early stopping and ``on_round``.

        Args:
            line: the line.
            absences: a text on clients without a usable reply, for the log, or "".
        """
        # Write the line first, because ``on_round`` may read the file.
        self._folder.add_round(line)
        if self.stopping:
            self.stopping.add(line)
            self._note_stop()
        shown = []
        for name in (*self._headlines, TRAIN_LOSS):
            if name in line:
                what = " (mean over clients)" if name.startswith("personal") else ""
                shown.append(f"{name} {line[name]:.4f}{what}")
        if absences:
            shown.append(f"({absences})")
        logger.info(
            "round %d/%d: %s",
            line["round"],
            self._config.num_server_rounds,
            " ".join(shown),
        )
        if self._on_round:
            self._on_round(line)

    def _note_stop(self) -> None:
        """End the run before its next round if early stopping ends it."""
        if self.stopping and self.stopping.stops:
            self._strategy.stopped = True
            logger.info(
                "early stopping: %s was best in round %s",
                self.stopping.metric,
                self.stopping.best(),
            )

    def finish(
        self, result: Result, diverged: DivergedError | None = None
    ) -> dict[str, Any]:
        """Write the model and the summary, and return the summary.

        Args:
            result: the result of the strategy's ``start``.
            diverged: the error that ended the run; None without an error.

        Raises:
            DivergedError: the run diverged, now or before it was resumed.
            NothingTrainedError: no round had enough usable replies.
        """
        lines = self.lines()
        # If the run was resumed after it had diverged, no round is done, so take the
        # divergence from the last line.
        last = lines[-1] if lines else {}
        stops = self._config.on_divergence == "stop" and DIVERGED_AT in last
        if not diverged and stops:
            rounds = {"diverged": last["diverged"], "diverged_at": last[DIVERGED_AT]}
            report = RoundReport(last["round"], last["phase"], **rounds)
            advice = " ".join(self._strategy.advice(last["round"]))
            text = divergence(report, advice)
            diverged = DivergedError(text, report.diverged_at, result)
        kept_previous = (
            line.get("kept-previous") and DIVERGED_AT not in line for line in lines
        )
        if not diverged and all(kept_previous):
            text = nothing_trained(1, self._strategy.reports)
            raise NothingTrainedError(text, result)

        summary = self._results(from_record(self._back_to_best() or result.arrays))
        if diverged:
            raise diverged
        return summary

    def _back_to_best(self) -> ArrayRecord | None:
        """Restore the strategy after the best round, and return the model of this round.

        Without early stopping, or without any score, do nothing and return None.
        """
        saved = self._checkpoints.best(self.stopping) if self.stopping else None
        if saved is None:
            return None
        # Local state in memory is from the last round, because earlier states are lost.
        volatile = saved.strategy["kept"]["volatile"]
        if volatile:
            logger.warning(
                "client(s) %s kept their local state in memory only. They continue with"
                " the state of the last round, not of round %d, the best. Set"
                " state-dir, in the run's config or in each node's.",
                ", ".join(self._strategy.run.nodes.with_names(volatile)),
                saved.server_round,
            )
        return self._strategy.go_back(
            to_record(saved.state), saved.strategy, saved.server_round
        )

    def _results(self, state: State) -> dict[str, Any]:
        """Write local states, model, extras and summary, and return the summary.

        The extras are the models that clients change before tests, and the table of
        predictions. Their failure does not end the run.

        With early stopping, ``state`` and the strategy belong to the best round.
        """
        strategy = self._strategy
        # Add the results, and the method's own results, such as the round of T*.
        lines = self.lines()
        chosen = len(lines)
        if self.stopping:
            chosen = self.stopping.best() or chosen
        summary: dict[str, Any] = {"strategy": self._config.strategy}
        summary |= self._figures(lines)
        since = summary.get(DIVERGED_AT)
        summary |= strategy.outcome(chosen)
        if self._checkpoints.resumed_after:
            summary["resumed-after"] = [*self._checkpoints.resumed_after]

        # Add the facts that are necessary to repeat the run. With client-level privacy,
        # publish nothing about single clients, not even the hash of their local state.
        kept: Iterable[tuple[str, State]] = ()
        local: Mapping[str, str] = {}
        changes = ""
        if not strategy.protection.always_releases:
            local = strategy.run.kept.hashes
            changes = strategy.methods.changes_before_tests
            kept = () if changes else kept_by_clients(self._config, strategy)
        summary["sha256"] = state_sha256(state, local)
        summary["seed"] = self._config.seed
        summary["versions"] = versions()

        # Write the model without the parts that have no global value.
        contents = summary["model"] = contents_of_model(strategy)
        clients = self._folder.save_clients(kept)
        absent = [part for part, text in contents.items() if text == ABSENT]
        shared = state
        if absent:
            part_of = strategy.run.parts.part_of
            shared = {
                n: array for n, array in state.items() if part_of[n] not in absent
            }
            summary["model-note"] = why_absent(absent, clients)

        # Write the metadata that other programs need to use the model.
        about = {"format": "pt", **contents, "sha256": summary["sha256"]}
        about[MODEL_DESCRIPTION] = self._model_description.to_json()
        if strategy.methods.own_models and local:
            about[KEPT_HASHES] = json.dumps(dict(sorted(local.items())))
        if since and chosen >= since:
            about[DIVERGED_AT] = str(since)
        if changes:
            about[BEFORE_TESTS] = changes
        if self._data and not self._config.protected:
            about |= facts_of_columns(self._config, self._data.train_view())
        if strategy.run.class_moments:
            self._folder.save_class_moments(strategy.run.class_moments)
        self._folder.save_model(shared, about)

        run = self._folder.path
        again = f"To repeat it: {command('run', '--out', run, '--resume')}"
        if changes:
            tested = tested_models(
                self._config, self._data, strategy, state, chosen, again
            )
            with extra(f"The {changes}", again):
                clients = self._folder.save_clients(tested)
            if absent:
                summary["model-note"] = why_absent(absent, clients)
        with extra("The table of sites", again):
            sites = self._tester.at_end(state, run, clients, self._site_names())
            if sites:
                summary["sites"] = [site.summary for site in sites]
                both = [test for site in sites for test in (site.test, site.by_batch)]
                save_predictions(run, [test for test in both if test])
                # The clients may have tested their models in this round.
                known = {key_of(test) for test in read_tests(run).itertuples()}
                own = "own" if self._headlines[0].startswith("personal") else "global"
                tests = [one for site in sites for one in site.measured(chosen, own)]
                self._folder.add_tests(
                    [one for one in tests if key_of(one) not in known]
                )
        if "model-note" in summary:
            logger.info("%s", summary["model-note"])
        # Write the summary last, because a run with a summary counts as finished.
        self._folder.save("summary.json", summary)
        return summary

    def _figures(self, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the results for the summary."""
        headline = self._headlines[0]
        # With early stopping, the result is from the best round. Otherwise it is from
        # the last test, even if this test has no value.
        best_validated = self.stopping.best() if self.stopping else None
        last: Mapping[str, Any] = {}
        if best_validated:
            last = lines[best_validated - 1]
        else:
            for line in lines:
                if self._due(line["round"]) or line.get(headline) is not None:
                    last = line
        validation = f"{VALIDATION}-"
        results = ("train-", "test-", "personal-", validation, HELD_OUT)
        final = {}
        for key, value in last.items():
            if key == "round" or key.startswith(results):
                final[key] = value
        if final:
            final.setdefault(headline, None)
            self._warn_of_result(final, headline, best_validated or len(lines))

        figures: dict[str, Any] = {
            "headline": headline,
            "task": self._task.name,
            **own_score(self._task.score),
            "final": final,
            "rounds": len(lines),
            "ledger": ledger_of(lines),
            "seconds": round(sum(line["seconds"] for line in lines), 3),
            "rejected": sum(len(line["rejected"]) for line in lines),
        }
        since = [line[DIVERGED_AT] for line in lines if DIVERGED_AT in line]
        if since:
            figures[DIVERGED_AT] = since[0]
        if self.stopping:
            shorter = len(lines) < self._config.num_server_rounds
            figures["stopped-early"] = self.stopping.stops and shorter
            figures["best-validation"] = {
                "round": best_validated,
                self.stopping.metric: last.get(self.stopping.metric),
            }
        return figures

    def _warn_of_result(
        self, final: Mapping[str, Any], headline: str, of_model: int
    ) -> None:
        """Warn if the result has no value, or is from another round than the model."""
        tested = final["round"]
        if final[headline] is None:
            why = "no reply with this metric arrived, or the metric is not defined"
            logger.warning(
                "the result is from round %d, but this round has no %s: %s",
                tested,
                headline,
                why,
            )
        if tested != of_model:
            logger.warning(
                "the result is from round %d, the last test, but the model is from"
                " round %d",
                tested,
                of_model,
            )

    def _due(self, server_round: int) -> bool:
        """Return whether the round has a test. The last round always has one."""
        if server_round == self._config.num_server_rounds:
            return True
        return server_round % self._config.eval_every == 0


def _moved(traffic: Traffic, prefix: str = "") -> dict[str, int]:
    """Return the traffic of a round by the keys of a line of metrics."""
    values = (
        traffic.exchanges,
        traffic.down,
        traffic.up,
        traffic.counters_down,
        traffic.counters_up,
    )
    return {prefix + key: value for key, value in zip(COUNTED[1:], values, strict=True)}
