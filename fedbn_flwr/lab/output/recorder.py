"""Recording a run: test the global model, write a line at the end of each round; write
model, curves and summary.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord
from torch import nn

from fedbn_flwr.batchnorm.averaging import State
from fedbn_flwr.client.personal_model import ABSENT, KEPT_HASHES, why_absent
from fedbn_flwr.lab.config import Config, data_of
from fedbn_flwr.lab.early_stopping import EarlyStopping
from fedbn_flwr.lab.files import COUNTED, ledger_of, read_metrics
from fedbn_flwr.lab.output.client_tests import (
    HeldOut,
    client_means,
    client_means_by_domain,
    tested_at_clients,
)
from fedbn_flwr.lab.output.folder import DIVERGED_AT, RunFolder
from fedbn_flwr.lab.output.global_tests import GlobalTests, headlines
from fedbn_flwr.lab.output.model_description import MODEL_DESCRIPTION, ModelDescription
from fedbn_flwr.lab.output.site_tests import table_of_run
from fedbn_flwr.lab.output.summary import (
    HELD_OUT,
    contents_of_model,
    kept_by_clients,
    versions,
)
from fedbn_flwr.lab.partitioned.partitioned_data import PartitionedData
from fedbn_flwr.messages.protocol import (
    DROPPED_BATCHES,
    EXAMPLES_PROCESSED,
    TRAIN_ACCURACY,
    TRAIN_LOSS,
    VALIDATION,
)
from fedbn_flwr.messages.records import from_record, state_sha256, tensors, to_state
from fedbn_flwr.messages.traffic import Traffic
from fedbn_flwr.server.runs.report import RoundReport
from fedbn_flwr.strategies import Strategy
from fedbn_flwr.training.wrappers import load_state

__all__ = ["OnRound", "Recorder"]

logger = logging.getLogger("flwr")

OnRound = Callable[[Mapping[str, Any]], None]
"""Called with each line of ``metrics.jsonl``."""

REFUSED = "a reply was refused; the server's log has the reason"


class Recorder:
    """Tests the global model if ``eval-on`` asks for it, and writes a line for each
    round.

    Attributes:
        stopping: the validation scores, which say when the run ends; None without early
            stopping.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: Config,
        model: nn.Module,
        data: PartitionedData | None,
        strategy: Strategy | None,
        on_round: OnRound | None,
    ) -> None:
        self._folder, self._config, self._model = folder, config, model
        self._strategy, self._on_round = strategy, on_round
        self._model_description = ModelDescription.of(
            config, data.dataset if data else None
        )
        self._task, self._data = data_of(config).test_task, data
        self._withheld = (
            strategy is not None and not strategy.protection.publishes_metrics
        )
        self._held_out = (
            HeldOut(data, self._task, config.test_bn)
            if data and data.held_out
            else None
        )
        domains = data.domain_views() if data and not self._withheld else {}
        self._domain_of = (
            functools.cache(data.domain_of) if data and domains else lambda client: None
        )
        self._tests = GlobalTests(config, model, data, domains, strategy)
        self._tests.try_batches()
        if self._held_out:
            self._held_out.try_batches(model)
        self.stopping = None
        if config.early_stopping:
            self.stopping = EarlyStopping(config, self.lines())  # of a resumed run
        self._note_stop()
        self._tested: dict[str, Any] = {}  # of this round, until its line is written
        self._by_domain: dict[str, dict[str, float]] = {}
        self.start_clock()

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of all rounds so far."""
        return read_metrics(self._folder.path / "metrics.jsonl")

    def start_clock(self) -> None:
        """Count the seconds of a round from now."""
        self._clock = time.monotonic()

    def test(
        self, server_round: int, arrays: ArrayRecord | None = None
    ) -> dict[str, Any]:
        """Test the global model if this round has a test; return the metrics of
        ``eval-on``.

        Args:
            server_round: the round.
            arrays: the global model; None = the recorder's model is up to date.
        """
        self._tested, self._by_domain = {}, {}
        if not self._due(server_round):
            return {}
        state = from_record(arrays) if arrays else None
        metrics, self._by_domain = self._tests.run(state)
        self._tested |= metrics
        if self._held_out:
            self._tested |= self._test_held_out(self._held_out, state)
        return metrics

    def test_at_clients(
        self, server_round: int, tests: Sequence[str]
    ) -> dict[str, Any]:
        """Return the tests of the recorder's model at each client, as clients reply, if
        this round has a test.
        """
        if self._data is None or not tests or not self._due(server_round):
            return {}
        return tested_at_clients(self._model, self._data, tests, self._task)

    def write(self, report: RoundReport) -> dict[str, Any]:
        """Write and return the line of a round that has been tested, and call
        ``on_round`` with it.
        """
        line: dict[str, Any] = {"round": report.server_round, "phase": report.phase}
        reported = self._strategy.methods.reported_metrics if self._strategy else []
        measured = (TRAIN_LOSS, TRAIN_ACCURACY, *reported)
        line |= {key: report.metrics[key] for key in measured if key in report.metrics}
        line |= self._tested
        line |= client_means(report, self._task)
        domains = self._by_domain | client_means_by_domain(
            report, self._domain_of, self._task
        )
        line |= self._counted(report)
        if report.evaluations:
            line["clients"] = report.evaluations
        if domains:
            line["domains"] = domains
        line["seconds"] = round(time.monotonic() - self._clock, 4)
        line["rejected"] = (
            [REFUSED] * len(report.rejected)
            if self._withheld
            else list(report.rejected.values())
        )
        if report.kept_previous:
            line["kept-previous"] = True
        if report.diverged:
            line |= {DIVERGED_AT: report.diverged_at, "diverged": report.diverged}
        self.start_clock()
        self._add(line)
        return line

    def _test_held_out(self, held_out: HeldOut, state: State | None) -> dict[str, Any]:
        """Return the tests of the held-out clients; the model has the global state
        again afterwards.
        """
        if state is None:
            state = {
                name: array.copy()
                for name, array in to_state(self._model.state_dict()).items()
            }
        tested = held_out.test(self._model, state, self._strategy)
        load_state(self._model, tensors(state))
        return tested

    def _counted(self, report: RoundReport) -> dict[str, Any]:
        """Return the examples that were processed, the clients, the traffic, and what
        privacy was spent.
        """
        counted: dict[str, Any] = {}
        clients = report.clients.values() or [report.metrics]
        if not self._withheld:
            counted["examples"] = int(
                sum(client.get(EXAMPLES_PROCESSED, 0) for client in clients)
            )
            counted[DROPPED_BATCHES] = int(
                sum(client.get(DROPPED_BATCHES, 0) for client in clients)
            )
        counted |= {
            "participants": report.participants,
            **_moved(report.train),
            **report.privacy,
        }
        if report.evaluate.exchanges:
            counted |= _moved(report.evaluate, "evaluation-")
        return counted

    def _add(self, line: dict[str, Any]) -> None:
        """Write the line of a round, stop the run if it is time, and tell the log and
        ``on_round``.
        """
        self._folder.add_round(line)
        if self.stopping:
            self.stopping.add(line)
            self._note_stop()
        shown = []
        for name in (*headlines(self._config), TRAIN_LOSS):
            if name in line:
                what = " (mean over clients)" if name.startswith("personal") else ""
                shown.append(f"{name} {line[name]:.4f}{what}")
        logger.info(
            "round %d/%d: %s",
            line["round"],
            self._config.num_server_rounds,
            " ".join(shown),
        )
        if self._on_round:
            self._on_round(line)

    def _note_stop(self) -> None:
        """Log that early stopping ends the run, if it does."""
        if self._strategy and self.stopping and self.stopping.stops:
            logger.info(
                "early stopping: %s was best in round %s",
                self.stopping.metric,
                self.stopping.best(),
            )

    def finish(
        self, state: State, strategy: Strategy | None, resumed_after: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Write model, curves and summary; return the summary.

        With early stopping, ``state`` and the strategy are those of the best round.
        """
        lines = self.lines()
        chosen = (self.stopping.best() if self.stopping else None) or len(lines)
        summary: dict[str, Any] = {
            "strategy": strategy.name if strategy else self._config.strategy
        }
        summary |= self._figures(lines)
        since = summary.get(DIVERGED_AT)
        summary |= strategy.outcome(chosen) if strategy else {}
        if resumed_after:
            summary["resumed-after"] = list(resumed_after)
        private = strategy is not None and strategy.protection.always_releases
        local = strategy.run.kept.hashes if strategy and not private else {}
        summary |= {
            "sha256": state_sha256(state, local),
            "seed": self._config.seed,
            "versions": versions(),
        }
        if sites := table_of_run(
            self._config, self._model, self._data, strategy, state
        ):
            summary["sites"] = sites
        contents = summary["model"] = contents_of_model(strategy)
        clients = self._folder.save_clients(
            kept_by_clients(self._config, strategy, state)
            if strategy and not private
            else ()
        )
        absent = [part for part, text in contents.items() if text == ABSENT]
        if strategy and absent:
            summary["model-note"] = why_absent(absent, clients)
            logger.info("%s", summary["model-note"])
            state = {
                name: array
                for name, array in state.items()
                if strategy.run.parts.part_of[name] not in absent
            }
        about = {"format": "pt", **contents, "sha256": summary["sha256"]}
        # what using the model elsewhere needs
        about[MODEL_DESCRIPTION] = self._model_description.to_json()
        if strategy and strategy.local and local:
            about[KEPT_HASHES] = json.dumps(dict(sorted(local.items())))
        if since and chosen >= since:
            about[DIVERGED_AT] = str(since)
        self._folder.finish(state, about, summary)
        return summary

    def _figures(self, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the results for the summary: those of the best round with early
        stopping, else of the last test.
        """
        headline = headlines(self._config)[0]
        measured = [line for line in lines if line.get(headline) is not None]
        choose = max if self._task.higher_is_better else min
        best = choose(measured, key=lambda line: line[headline], default={})
        best_validated = self.stopping.best() if self.stopping else None
        last: Mapping[str, Any] = {}
        if best_validated:
            last = lines[best_validated - 1]
        elif measured:
            last = [
                line
                for line in lines
                if self._due(line["round"]) or line.get(headline) is not None
            ][-1]
        results = (
            "train-",
            "test-",
            "personal-",
            f"{VALIDATION}-",
            HELD_OUT,
            "domains",
        )
        final = {
            key: value
            for key, value in last.items()
            if key == "round" or key.startswith(results)
        }
        if measured:
            final.setdefault(headline, None)
            self._warn_of_result(final, headline, best_validated or len(lines))
        figures: dict[str, Any] = {
            "headline": headline,
            "final": final,
            "best": {"round": best.get("round"), headline: best.get(headline)},
            "rounds": len(lines),
            "ledger": ledger_of(lines),
            "seconds": round(sum(line["seconds"] for line in lines), 3),
            "rejected": sum(len(line["rejected"]) for line in lines),
        }
        if since := [line[DIVERGED_AT] for line in lines if DIVERGED_AT in line]:
            figures[DIVERGED_AT] = since[0]
        if self.stopping:
            figures["stopped-early"] = (
                self.stopping.stops and len(lines) < self._config.num_server_rounds
            )
            figures["best-validation"] = {
                "round": best_validated,
                self.stopping.metric: last.get(self.stopping.metric),
            }
        return figures

    def _warn_of_result(
        self, final: Mapping[str, Any], headline: str, of_model: int
    ) -> None:
        """Warn where the result has no value, or is not that of the saved model."""
        tested = final["round"]
        if final[headline] is None:
            why = "no reply with it arrived, or it is not defined"
            logger.warning(
                "the result is that of round %d, which has no %s: %s",
                tested,
                headline,
                why,
            )
        if tested != of_model:
            logger.warning(
                "the result is that of round %d, the last test; the model is of"
                " round %d",
                tested,
                of_model,
            )

    def close(self) -> None:
        """Move the test model to the CPU, to free the device's memory."""
        self._model.cpu()

    def _due(self, server_round: int) -> bool:
        return (
            server_round % self._config.eval_every == 0
            or server_round == self._config.num_server_rounds
        )


def _moved(traffic: Traffic, prefix: str = "") -> dict[str, int]:
    values = (
        traffic.exchanges,
        traffic.down,
        traffic.up,
        traffic.counters_down,
        traffic.counters_up,
    )
    return {prefix + key: value for key, value in zip(COUNTED[1:], values, strict=True)}
