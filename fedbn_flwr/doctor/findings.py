"""What the doctor says: findings with evidence and remedies, and the figures behind them."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Diagnosis", "Finding", "Remedy"]


@dataclass(frozen=True)
class Remedy:
    """What to try.

    Attributes:
        setting: config keys of this package, or the call in a program: what to write.
        why: what it does.
    """

    setting: str
    why: str


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
        findings = [
            {
                "id": finding.id,
                "what": finding.what,
                "evidence": [*finding.evidence],
                "numbers": dict(finding.numbers),
                "remedies": [vars(remedy) for remedy in finding.remedies],
            }
            for finding in self.findings
        ]
        found: dict[str, Any] = _plain(
            {
                "about": self.about,
                "findings": findings,
                "measures": self.measures,
                "not-measured": [*self.not_measured],
                "notes": [*self.notes],
            }
        )
        return found

    def save(self, out: str | Path) -> list[Path]:
        """Write ``doctor.json``, ``doctor.md`` and the pictures into a folder; return the files.

        Raises:
            OSError: a file cannot be written.
        """
        from fedbn_flwr.doctor.pictures import pictures

        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        files: dict[str, bytes] = {
            "doctor.json": (json.dumps(self.to_json(), indent=2) + "\n").encode(),
            "doctor.md": self.markdown().encode(),
            **pictures(self.to_json()["measures"]),
        }
        for name, content in files.items():
            temporary = folder / f".{name}.partial"
            temporary.write_bytes(content)
            temporary.replace(folder / name)
        return [folder / name for name in files]

    def _written(self, heading: str, finding: str, remedy: str) -> str:
        number = len(self.findings)
        verdict = f"{number} finding{'s' if number > 1 else ''}, the cause first." if number else "Nothing found."
        blocks = [f"{self.about}\n{verdict}" if not heading else f"{self.about}\n\n**{verdict}**"]
        for index, one in enumerate(self.findings, 1):
            bullets = "\n".join(_wrapped(f"- {text}", "  ") for text in one.evidence)
            tries = "\n".join(
                _wrapped(remedy.format(place, r.setting, r.why), "   ") for place, r in enumerate(one.remedies, 1)
            )
            tries = tries and f"\n\nTry, in order:\n\n{tries}"
            title = finding.format(index, one.what)
            title = title if heading else _wrapped(title, "")  # a heading of Markdown is one line
            blocks.append(f"{title}\n\n{bullets}{tries}")
        for title, lines in (("Not measured", self.not_measured), ("Notes", self.notes)):
            if lines:
                rows = "\n".join(_wrapped(f"- {line}", "  ") for line in lines)
                blocks.append(f"{heading}{title}{'' if heading else ':'}\n\n{rows}" if heading else f"{title}:\n{rows}")
        text = "\n\n".join(blocks)
        return (
            text if heading else text.replace("\n\n- ", "\n- ").replace(":\n\n1)", ":\n1)").replace("\n\nTry", "\nTry")
        )


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
