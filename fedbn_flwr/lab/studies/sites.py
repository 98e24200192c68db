"""The tables by site of a study: each method against those that ``against`` names, at each site."""

from __future__ import annotations

import functools
import json
from typing import Any

from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.lab.finished_runs.sites import compare, outputs_of
from fedbn_flwr.lab.output.folder import DIVERGED_AT
from fedbn_flwr.lab.sites.table import columns, decisions, sentences
from fedbn_flwr.lab.studies.results import StudyResults
from fedbn_flwr.lab.studies.rows import grouped, markdown_table

__all__ = ["SITES", "write_sites"]

SITES = "sites.json"  # in the folder of a study


def write_sites(results: StudyResults) -> str:
    """Write ``sites.json`` and ``sites.md``, and return the Markdown; "" where ``against`` names no method.

    The runs of the seeds that both methods finished are paired, those whose test examples are those of the first one.
    The models are tested again, since a run keeps no outputs.

    Raises:
        ConfigError: own data have changed since a run.
        StateError: a run lacks a model.
    """
    study, out = results.study, results.out
    tested = functools.cache(outputs_of)
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
                pairs = [[tested(cell.folder(out), metric) for cell in (seeds[seed], others[seed])] for seed in seeds]
                pairs = [pair for pair in pairs if pair[0].has_examples_of(pairs[0][0])]
                table = compare([one for one, _ in pairs], [other for _, other in pairs], reference)
                tables.append({"split": split, "method": method, **table})
    for name in (SITES, "sites.md"):
        (out / name).unlink(missing_ok=True)
    if not tables:
        return ""
    text = f"# {study.name}, by site\n"
    for table in tables:
        head, rows = columns(table)
        named = f"{table['method']} against {table['against']}, {table['split']}"
        text += f"\n## {named}\n\n{markdown_table(head, rows)}\n\n"
        text += "".join(f"- {site}: {decision}; {what_next}\n" for site, decision, what_next in decisions(table))
        text += "\n" + " ".join(sentences(table)) + "\n"
    write_atomically(out / SITES, json.dumps({"tables": tables}, indent=1, allow_nan=False) + "\n")
    write_atomically(out / "sites.md", text)
    return text
