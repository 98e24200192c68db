"""The tables by site of a study: each method against those that ``against`` names, at each site."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.lab.files import read_json
from fedbn_flwr.lab.finished_runs.sites import compare, outputs_of
from fedbn_flwr.lab.output.folder import DIVERGED_AT
from fedbn_flwr.lab.output.summary import versions
from fedbn_flwr.lab.sites.table import columns, decisions, sentences
from fedbn_flwr.lab.studies.results import StudyResults
from fedbn_flwr.lab.studies.rows import Grid, Page, Pages, grouped

__all__ = ["SITES", "write_sites"]

SITES = "sites.json"  # in the folder of a study
_MADE_OF = "made-of"  # the key of a table's fingerprint


def write_sites(results: StudyResults) -> Pages:
    """Write ``sites.json`` and ``sites.md``, and return the tables; none where ``against`` names no method.

    The runs of the seeds that both methods finished are paired, those whose test examples are those of the first one.
    The models are tested again, since a run keeps no outputs; but a table in ``sites.json`` of the same runs stays.

    Raises:
        ConfigError: own data have changed since a run.
        StateError: a run lacks a model.
    """
    study, out = results.study, results.out
    tested = functools.cache(outputs_of)
    earlier = read_json(out / SITES).get("tables", [])
    before = {(table["split"], table["method"], table["against"]): table for table in earlier}
    tables: list[dict[str, Any]] = []
    for split, of_split in grouped(study.cells(), lambda cell: cell.split).items():
        finished = [cell for cell in of_split if (done := results.summary(cell)) and DIVERGED_AT not in done]
        methods = grouped(finished, lambda cell: cell.method)
        for reference in study.against:
            for method, cells in methods.items():
                others = {cell.seed: cell for cell in methods.get(reference, ())}
                seeds = {cell.seed: cell for cell in cells if cell.seed in others}
                if method == reference or not seeds:
                    continue
                metric = cells[0].config.learning_task().score
                paired = [(seeds[seed], others[seed]) for seed in seeds]
                made_of = _fingerprint(metric, [[results.summary(cell) for cell in pair] for pair in paired])
                table = before.get((split, method, reference), {})
                if table.get(_MADE_OF) != made_of:
                    pairs = [[tested(cell.folder(out), metric) for cell in pair] for pair in paired]
                    pairs = [pair for pair in pairs if pair[0].has_examples_of(pairs[0][0])]
                    table = compare([one for one, _ in pairs], [other for _, other in pairs], reference)
                    table = {"split": split, "method": method, **table, _MADE_OF: made_of}
                tables.append(table)
    for name in (SITES, "sites.md"):
        (out / name).unlink(missing_ok=True)
    if not tables:
        return Pages()
    pages = [Page(f"{study.name}, by site", ())]
    for table in tables:
        head, rows = columns(table)
        named = f"{table['method']} against {table['against']}, {table['split']}"
        decided = [f"- {site}: {decision}; {what_next}" for site, decision, what_next in decisions(table)]
        below = ["\n".join(decided)] if decided else []
        pages.append(Page(named, (Grid.of(head, rows), *below, " ".join(sentences(table))), level=2))
    write_atomically(out / SITES, json.dumps({"tables": tables}, indent=1, allow_nan=False) + "\n")
    write_atomically(out / "sites.md", str(Pages(pages)))
    return Pages(pages)


def _fingerprint(metric: str, summaries: Sequence[Any]) -> str:
    """Return the SHA-256 of what a table depends on: the metric, this version, and the runs by their summaries."""
    made_of = json.dumps([metric, versions()["fedbn-flwr"], summaries], sort_keys=True)
    return hashlib.sha256(made_of.encode()).hexdigest()
