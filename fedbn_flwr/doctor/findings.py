"""What the doctor says: findings with evidence and remedies, and the figures behind."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedbn_flwr.norms.replaced_layers import shown_path

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
        if self.findings:
            verdict = f"{number_of(len(self.findings), 'finding')}, the cause first."
        elif self.not_measured:
            # No finding, and no proof of health.
            verdict = (
                "Nothing found in what was measured. Not known:"
                f" {number_of(len(self.not_measured), 'part')}, below."
            )
        else:
            verdict = "Nothing found."
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
        """Return the diagnosis as JSON values; null for a number that is not finite."""
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
    """Return a finding with its evidence and remedies, in lines."""
    lines = [_wrapped(f"{number}. {finding.what}"), *_points(finding.evidence)]
    if finding.remedies:
        lines.append("Try, in order:")
    for place, remedy in enumerate(finding.remedies, 1):
        lines.append(_wrapped(f"{place}) {remedy.setting}: {remedy.text}", "   "))
    return "\n".join(lines)


def _points(texts: Sequence[str]) -> list[str]:
    return [_wrapped(f"- {text}", "  ") for text in texts]


def _of_clients(measures: Mapping[str, Any]) -> list[str]:
    """Return the table of the clients, empty where no accuracy was measured."""
    if "accuracy" not in measures:
        return []
    columns = measures["clients"], measures["examples"], measures["accuracy"]
    rows = [*zip(*columns, strict=True)]
    table = ["| client | examples | accuracy |", "|---|---|---|"]
    for name, count, accuracy in rows[:_ROWS]:
        table.append(f"| {name} | {count:,} | {accuracy:.3f} |")
    if len(rows) > _ROWS:
        table.append(f"| {len(rows) - _ROWS} more: in the JSON | | |")
    return table


def _wrapped(text: str, indent: str = "") -> str:
    # Names of files, layers and settings stay whole, to be copied.
    return textwrap.fill(
        text,
        100,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _plain(value: Any) -> Any:
    """Return JSON values: floats with six digits, NaN and infinity as None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def listed(names: Collection[str]) -> str:
    """Return at most three of the names, and dots for the others."""
    dots = ", ..." if len(names) > 3 else ""
    return ", ".join(map(shown_path, [*names][:3])) + dots


def number_of(count: int, what: str, several: str = "") -> str:
    """Return "1 client", "2 clients"; ``several`` is a plural without s."""
    if count == 1:
        return f"1 {what}"
    return f"{count:,} {several or what + 's'}"
