"""The results of the doctor, such as findings with their evidence and remedies."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedbn_flwr.norms.replaced_layers import shown_path

_ROWS = 100  # most clients that get a row in the printed table


@dataclass(frozen=True)
class Remedy:
    """One remedy to try.

    Attributes:
        setting: the text to write: config keys of this package, or a call in a program.
        why: the effect of the remedy.
    """

    setting: str
    why: str


@dataclass(frozen=True)
class Finding:
    """One fault.

    Attributes:
        id: a stable name such as "label-skew"; ``docs/doctor.md`` lists them.
        what: one sentence about the fault.
        evidence: sentences that prove the fault, with numbers.
        numbers: the same numbers for programs.
        remedies: the remedies to try, in order.
    """

    id: str
    what: str
    evidence: Sequence[str]
    numbers: Mapping[str, Any]
    remedies: Sequence[Remedy]


@dataclass(frozen=True)
class Diagnosis:
    """The result of ``diagnose``. ``print`` shows it as text.

    Attributes:
        about: the number of layers, clients and examples that were examined.
        findings: the faults, the cause first.
        measures: the figures; see ``docs/doctor.md``.
        not_measured: measurements that were impossible, each with the reason.
        notes: facts that a reader needs to interpret the figures.
    """

    about: str
    findings: Sequence[Finding]
    measures: Mapping[str, Any] = field(default_factory=dict)
    not_measured: Sequence[str] = ()
    notes: Sequence[str] = ()

    def __str__(self) -> str:
        """Return the diagnosis as text of up to 100 characters per line."""
        if self.findings:
            verdict = f"{number_of(len(self.findings), 'finding')}, the cause first."
        elif self.not_measured:
            # The absence of findings does not prove health.
            verdict = (
                "Nothing found in the measured parts. Unknown:"
                f" {number_of(len(self.not_measured), 'part')}, below."
            )
        else:
            verdict = (
                "Nothing found. Labels of images that mean other classes at one client"
                " cannot be seen."
            )
        blocks = [f"{self.about}\n{verdict}"]
        for number, finding in enumerate(self.findings, 1):
            blocks.append(_in_words(number, finding))
        for title, lines in (
            ("Clients", _of_clients(self.measures)),
            ("Not measured", _points(self.not_measured)),
            ("Notes", _points(self.notes)),
        ):
            if lines:
                blocks.append("\n".join([f"{title}:", *lines]))
        return "\n\n".join(blocks)

    def to_json(self) -> dict[str, Any]:
        """Return the diagnosis as JSON values, with null for non-finite numbers."""
        entries: dict[str, Any] = {
            "about": self.about,
            "findings": [
                {**vars(finding), "remedies": list(map(vars, finding.remedies))}
                for finding in self.findings
            ],
            "measures": self.measures,
            "not-measured": self.not_measured,
            "notes": self.notes,
        }
        return {key: _plain(value) for key, value in entries.items()}


def _in_words(number: int, finding: Finding) -> str:
    """Return the lines of a finding, with its evidence and remedies."""
    lines = [_wrapped(f"{number}. {finding.what}"), *_points(finding.evidence)]
    if finding.remedies:
        lines.append("Try, in order:")
    for place, remedy in enumerate(finding.remedies, 1):
        lines.append(_wrapped(f"{place}) {remedy.setting}: {remedy.why}", "   "))
    return "\n".join(lines)


def _points(texts: Sequence[str]) -> list[str]:
    return [_wrapped(f"- {text}", "  ") for text in texts]


def _of_clients(measures: Mapping[str, Any]) -> list[str]:
    """Return the table of the clients, empty if they were not compared."""
    rows = measures.get("sites", ())
    table = ["| client | examples | labels | inputs |", "|---|---|---|---|"]
    for row in rows[:_ROWS]:
        table.append(
            f"| {row['client']} | {row['examples']:,} | {row['labels_in_words']} |"
            f" {row['inputs_in_words']} |"
        )
    if len(rows) > _ROWS:
        table.append(f"| {len(rows) - _ROWS} more: in the JSON | | | |")
    return table if rows else []


def _wrapped(text: str, indent: str = "") -> str:
    # Do not break names of files, layers and settings, so that they can be copied.
    return textwrap.fill(
        text,
        100,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _plain(value: Any) -> Any:
    """Return JSON values, with six digits for floats and None for NaN and infinity."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def listed(names: Collection[str]) -> str:
    """Return up to three of the names, and dots if there are more."""
    dots = ", ..." if len(names) > 3 else ""
    return ", ".join(map(shown_path, [*names][:3])) + dots


def number_of(count: int, what: str, several: str = "") -> str:
    """Return a text such as "2 clients".

    ``several`` is the plural of ``what`` if the plural is irregular.
    """
    if count == 1:
        return f"1 {what}"
    return f"{count:,} {several or what + 's'}"
