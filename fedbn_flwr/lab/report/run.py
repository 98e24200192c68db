"""The report of a run."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from fedbn_flwr.errors import FedBNError
from fedbn_flwr.lab.config import CENTRALIZED, GROUPS, Config, read_overrides
from fedbn_flwr.lab.report.files import RunFiles
from fedbn_flwr.lab.report.page import Block, Code, Facts, More, Page, Section, Table, Text
from fedbn_flwr.lab.report.run_figures import clients_section, curves_section, domains_section, split_figures
from fedbn_flwr.lab.report.shown import duration, metric, setting, size, with_unit, with_unit_of
from fedbn_flwr.lab.report.statistics import batchnorm_section
from fedbn_flwr.messages.protocol import DROPPED_BATCHES
from fedbn_flwr.strategies import STRATEGIES

__all__ = ["command", "method_name", "run_page", "run_warnings"]


_RESULTS = ("test-", "train-", "personal-", "validation-", "held-out-")


def run_page(run: RunFiles, foot: str, live: int = 0) -> Page:
    """Return the page of a run.

    Args:
        run: its files.
        foot: the last line of the page.
        live: seconds after which an open page is loaded again; 0 = never.
    """
    sections = [
        curves_section(run),
        result_section(run),
        domains_section(run),
        clients_section(run),
        batchnorm_section(run),
        Section("split", "Data of the clients", split_figures(run)),
        traffic_section(run),
        settings_section(run),
        reproduce_section(run),
    ]
    config = run.config
    return Page(
        title=f"{method_name(config)} on {config.dataset}, {config.model}",
        above=f"Report of a run{', still running' if live else ''}",
        lead=[Text(_sentence(run), "lead"), Facts(list(_facts(run))), *(Text(w, "warning") for w in run_warnings(run))],
        sections=[section for section in sections if section],
        foot=foot,
        live=live,
    )


def method_name(config: Config) -> str:
    """Return the names of the methods as their papers write them, joined by "+"."""
    if config.strategy == CENTRALIZED:
        return "Centralized training"
    return "+".join(STRATEGIES[name].__name__ if name in STRATEGIES else name for name in config.title.split("+"))


def _sentence(run: RunFiles) -> str:
    """Return what was run, and what it reached."""
    config = run.config
    number, what = (config.local_steps, "step") if config.local_steps else (config.local_epochs, "epoch")
    work = f"{number} local {what}" if number == 1 else f"{number} local {what}s"
    split = "each with its own data" if config.data_on_nodes() else f"partition {config.partition}"
    clients = f"{config.num_clients} clients ({split})"
    who = "the union of the data of " + clients if config.strategy == CENTRALIZED else clients
    batch = f"batches of {config.batch_size}" if config.batch_size else "the whole local data"
    what = (
        f"The model {config.model} with norm={config.norm} is trained on {config.dataset} with {who}: "
        f"{config.num_server_rounds} rounds of {work} on {batch}."
    )
    key, best, final = run.headline, run.best, run.final
    if "round" not in final:
        return f"{what} No test is finished yet."
    reached = f" The {key} is {with_unit(key, final.get(key))} after round {final['round']}"
    if not best:
        return f"{what}{reached}."
    if best["round"] == final["round"]:
        return f"{what}{reached}, the best of the run."
    return f"{what}{reached}; the best is {with_unit(key, best[key])}, in round {best['round']}."


def _facts(run: RunFiles) -> Iterator[tuple[str, str]]:
    key, totals = run.headline, run.totals
    if "round" in run.final:
        yield f"{key}, final", with_unit(key, run.final.get(key))
    if run.best:
        yield f"best, in round {run.best['round']}", with_unit(key, run.best[key])
    total = run.config.num_server_rounds
    yield "rounds", f"{run.rounds}" if run.rounds == total else f"{run.rounds} of {total}"
    yield "exchanges", f"{totals.get('exchanges', 0):,}"
    yield "floats sent and received", size(totals.get("bytes-down", 0) + totals.get("bytes-up", 0))
    yield "time", duration(run.seconds)
    if (frozen := run.summary.get("frozen-after")) is not None:
        yield "BN frozen after", f"round {frozen}"
    if privacy := run.summary.get("privacy"):
        yield "privacy", privacy["guarantee"]


def run_warnings(run: RunFiles) -> list[str]:
    """Return what a reader must know before the numbers, the worst first."""
    warnings = list(_events(run))
    with suppress(FedBNError):  # its own data are not here
        warnings += run.config.warnings()
    if not run.config.protected:  # they name clients
        warnings += run.json("data.json").get("warnings", ())
    return warnings


def _events(run: RunFiles) -> Iterator[str]:
    """Yield what happened in the run."""
    if run.diverged_at:
        yield f"The run diverged in round {run.diverged_at}: {run.divergence}."
    if not run.summary:
        rounds = f"{len(run.lines)} of {run.config.num_server_rounds} rounds"
        if run.lines:
            written = datetime.fromtimestamp((run.folder / "metrics.jsonl").stat().st_mtime)
            rounds += f", the last one at {written:%Y-%m-%d %H:%M:%S}"
        yield f"The run is not finished: {rounds}."
    if run.lost:
        yield run.lost
    if run.summary.get("stopped-early"):
        yield (
            f"Early stopping ended the run after round {run.rounds}. The result is that of round "
            f"{run.final.get('round')}, which had the best validation score."
        )
    reasons = Counter(reason for line in run.lines for reason in line.get("rejected", ()))
    if reasons:
        shown = "; ".join(f"{count} times: {reason}" for reason, count in reasons.most_common(3))
        more = f"; and {len(reasons) - 3} more reasons" if len(reasons) > 3 else ""
        yield f"{reasons.total()} replies of clients were refused ({shown}{more})."
    if kept := [line["round"] for line in run.lines if line.get("kept-previous")]:
        yield f"Too few replies were usable in {len(kept)} rounds (the first is {kept[0]}): the model stayed."
    if dropped := sum(line.get(DROPPED_BATCHES, 0) for line in run.lines):
        yield f"{dropped} batches of one example were left out: BatchNorm cannot take them."
    if resumed := run.summary.get("resumed-after"):
        same = "" if run.config.protected else "; its bits are those of one run, if no resume changed its rounds"
        yield f"The run was interrupted and resumed after round {', '.join(map(str, resumed))}{same}."


def settings_section(run: RunFiles) -> Section:
    """Return the settings by group; those that make this run first."""
    settings = run.config.to_mapping()
    meanings = {field.alias: (field.description or "").replace("`", "") for field in Config.model_fields.values()}
    rows = [[key, setting(value), meanings[key]] for key, value in run.chosen.items()]
    tables = []
    for group in GROUPS:
        of_group = [[key, setting(settings[key])] for key in Config.keys(group)]
        tables.append(Table(["key", "value"], of_group, group.capitalize()))
    note = Text("Every other setting has its default, or follows from these.", "note")
    chosen = Table(["key", "value", "meaning"], rows)
    return Section("settings", "Settings", [chosen, note, More("All settings", tables)])


def result_section(run: RunFiles) -> Section | None:
    """Return the figures of the result, each with what it is."""
    definitions = run.summary.get("definitions", {})
    head = ["figure", f"round {run.final.get('round')}", "what it is"][: 3 if definitions else 2]
    rows = []
    for key, value in run.final.items():
        if key.startswith(_RESULTS) and (value is None or isinstance(value, (int, float))):
            cells = [with_unit_of(key), metric(key, value), definitions.get(key, "")]
            rows.append(cells[: len(head)])
    if not rows:
        return None
    blocks: list[Block] = [Table(head, rows)]
    if note := run.summary.get("model-note"):
        blocks.append(Text(str(note), "note"))
    return Section("result", "Result", blocks)


def traffic_section(run: RunFiles) -> Section:
    """Return the sums of the messages, of training and of tests."""
    totals, rounds = run.totals, max(run.rounds, 1)
    rows = []
    for what, prefix in (("training", ""), ("tests on clients", "evaluation-")):
        if f"{prefix}exchanges" not in totals:
            continue
        down, up = (totals.get(f"{prefix}{key}", 0) for key in ("bytes-down", "bytes-up"))
        counters = sum(totals.get(f"{prefix}counter-{key}", 0) for key in ("bytes-down", "bytes-up"))
        sizes = [size(number) for number in (down, up, down + up, (down + up) / rounds, counters)]
        rows.append([what, f"{totals[f'{prefix}exchanges']:,}", *sizes])
    head = ["messages of", "exchanges", "floats down", "floats up", "floats, sum", "per round", "counts"]
    text = (
        "Sizes of the arrays, without headers. An exchange is a round trip between the server and its clients; one "
        "broadcast counts once, and the answers of all clients are added. KiB, MiB and GiB are powers of 1024."
    )
    processed = Text(f"The clients processed {totals.get('examples', 0):,} training examples.")
    return Section("traffic", "Traffic", [Table(head, rows), processed, Text(text, "note")])


def reproduce_section(run: RunFiles) -> Section:
    """Return the command, the versions, the seed and the hash of the result."""
    text = (run.folder / "config.yaml").read_text(encoding="utf-8")
    blocks: list[Block] = [Code(command(run)), More("config.yaml, the whole settings", [Code(text)])]
    if sha256 := run.summary.get("sha256"):
        text = (
            "Two runs with the same SHA-256 end in the same bits. It needs the same versions and the same machine type."
        )
        rows = [["seed", str(run.summary.get("seed"))], ["SHA-256 of the final state", str(sha256)]]
        blocks += [Table(["what", "value"], rows), Text(text, "note")]
    if versions := run.summary.get("versions"):
        blocks.append(Table(["package", "version"], [[name, str(version)] for name, version in versions.items()]))
    return Section("reproduce", "Reproduce", blocks)


def command(run: RunFiles) -> str:
    """Return the command that repeats a run; it needs ``config.yaml`` where the settings hang on files elsewhere."""
    if not run.repeatable:
        return "fedbn-flwr run config.yaml --out runs/again"
    words = [f"--set {shlex.quote(f'{key}={_as_yaml(key, value)}')}" for key, value in run.chosen.items()]
    return _wrapped(["fedbn-flwr run", *words, "--out runs/again"])


def _as_yaml(key: str, value: Any) -> str:
    """Return the text that ``--set`` reads as the value: a text that looks like a number, say, is quoted."""
    text = setting(value)
    return text if read_overrides([f"{key}={text}"]) == {key: value} else json.dumps(value)


def _wrapped(words: Sequence[str], width: int = 90) -> str:
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) + 1 > width:
            lines[-1] += " \\"
            lines.append("  " + word)
        else:
            lines[-1] += " " + word
    return "\n".join(lines)
