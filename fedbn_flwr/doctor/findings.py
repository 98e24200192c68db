"""What the doctor says: findings with evidence and remedies, and the figures behind them."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbn_flwr.norms.report import shown_path

__all__ = ["Diagnosis", "Finding", "Remedy", "listed", "number_of"]

_ROWS = 100  # clients with a row in the printed table


@dataclass(frozen=True)
class Remedy:
    """What to try.

    Attributes:
        setting: config keys of this package, or the call in a program: what to write.
        why: what it does.
        expected: what it gained where that was measured, and what it costs.
    """

    setting: str
    why: str
    expected: str = ""

    @property
    def text(self) -> str:
        """Return what it does, gained and costs."""
        return f"{self.why}. {self.expected}" if self.expected else self.why


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        id: a stable name, "label-skew" say; ``docs/doctor.md`` lists them.
        what: what is wrong, one sentence.
        evidence: what shows it, in words with numbers.
        numbers: the same for programs.
        remedies: what to try, in order.
    """

    id: str
    what: str
    evidence: Sequence[str]
    numbers: Mapping[str, Any]
    remedies: Sequence[Remedy]


@dataclass(frozen=True)
class Diagnosis:
    """The answer of ``diagnose``; ``print`` shows it in words.

    Attributes:
        about: what was looked at.
        findings: what is wrong, the cause first.
        measures: the figures; see ``docs/doctor.md``.
        not_measured: what could not be measured, and why.
        notes: what a reader must know of the figures.
    """

    about: str
    findings: Sequence[Finding]
    measures: Mapping[str, Any] = field(default_factory=dict)
    not_measured: Sequence[str] = ()
    notes: Sequence[str] = ()

    def __str__(self) -> str:
        """Return the diagnosis as text of up to 100 characters a line."""
        return self._written("", "{}. {}", "{}) {}: {}")

    def markdown(self) -> str:
        """Return the diagnosis as a page in Markdown."""
        return "# Doctor\n\n" + self._written("## ", "## {}. {}", "{}. `{}`: {}") + "\n"

    def to_json(self) -> dict[str, Any]:
        """Return the diagnosis as JSON values; null for a number that is not finite."""
        entries: dict[str, Any] = {
            "about": self.about,
            "findings": [{**vars(finding), "remedies": list(map(vars, finding.remedies))} for finding in self.findings],
            "measures": self.measures,
            "not-measured": self.not_measured,
            "notes": self.notes,
        }
        return {key: _plain(value) for key, value in entries.items()}

    def save(self, out: str | Path) -> list[Path]:
        """Write ``doctor.json`` and ``doctor.md`` into a folder; return the files.

        Raises:
            OSError: a file cannot be written.
        """
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        files: dict[str, bytes] = {
            "doctor.json": (json.dumps(self.to_json(), indent=2) + "\n").encode(),
            "doctor.md": self.markdown().encode(),
        }
        for name, content in files.items():
            temporary = folder / f".{name}.partial"
            temporary.write_bytes(content)
            temporary.replace(folder / name)
        return [folder / name for name in files]

    def _written(self, heading: str, finding: str, remedy: str) -> str:
        """Return the diagnosis in Markdown if ``heading`` is the mark of its headings, else (no mark) as plain text."""
        gap = "\n\n" if heading else "\n"  # Markdown needs an empty line before a list
        number = len(self.findings)
        verdict = "Nothing found."
        if self.not_measured:  # no finding, and no proof of health
            parts = "1 part" if len(self.not_measured) == 1 else f"{len(self.not_measured)} parts"
            verdict = f"Nothing found in what was measured. Not known: {parts}, below."
        if number:
            verdict = f"{number} finding{'s' if number > 1 else ''}, the cause first."
        blocks = [f"{self.about}{gap}**{verdict}**" if heading else f"{self.about}{gap}{verdict}"]
        for index, one in enumerate(self.findings, 1):
            title = finding.format(index, one.what)
            pieces = [title if heading else _wrapped(title, "")]  # a heading of Markdown is one line
            if one.evidence:
                pieces.append(_bullets(one.evidence))
            if one.remedies:
                tries = [remedy.format(place, r.setting, r.text) for place, r in enumerate(one.remedies, 1)]
                pieces += ["Try, in order:", "\n".join(_wrapped(text, "   ") for text in tries)]
            blocks.append(gap.join(pieces))
        if table := _of_clients(self.measures):
            blocks.append((f"{heading}Clients" if heading else "Clients:") + gap + "\n".join(table))
        for title, lines in (("Not measured", self.not_measured), ("Notes", self.notes)):
            if lines:
                blocks.append((f"{heading}{title}" if heading else f"{title}:") + gap + _bullets(lines))
        return "\n\n".join(blocks)


def _of_clients(measures: Mapping[str, Any]) -> list[str]:
    """Return the table of the clients: examples, accuracy and loss on them; where they were measured."""
    names, losses = measures.get("clients", ()), measures.get("loss", ())
    if not losses:
        return []
    accuracies = measures["accuracy"] or [math.nan] * len(names)
    rows = zip(names, measures["examples"], accuracies, losses, strict=True)
    shown = [f"| {k} | {n:,} | {'-' if math.isnan(a) else f'{a:.3f}'} | {loss:.4g} |" for k, n, a, loss in rows]
    lines = ["| client | examples | accuracy | loss |", "|---|---|---|---|", *shown[:_ROWS]]
    if len(shown) > _ROWS:
        lines.append(f"| {len(shown) - _ROWS} more: in the JSON | | | |")
    return lines


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(_wrapped(f"- {line}", "  ") for line in lines)


def _wrapped(text: str, indent: str) -> str:
    return textwrap.fill(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _plain(value: Any) -> Any:
    """Return JSON values: NaN and infinity as None, floats with six significant digits."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def listed(names: Collection[str]) -> str:
    """Return at most three of the names, and dots for the others; the path of the model itself is empty."""
    return ", ".join(map(shown_path, [*names][:3])) + (", ..." if len(names) > 3 else "")


def number_of(count: int, what: str, several: str = "") -> str:
    """Return "1 client", "2 clients", "1,024 examples"; ``several`` is a plural without s."""
    return f"{count:,} {what if count == 1 else several or what + 's'}"
