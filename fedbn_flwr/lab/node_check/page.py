"""The result of a node's check: one page of findings."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["Finding", "Page", "fault", "ok", "untried", "warning"]

Level = Literal["ok", "warning", "fault", "not tried"]
_WIDTH = 110


@dataclass(frozen=True)
class Finding:
    """What one step of the check found.

    Attributes:
        level: "fault": the node cannot take part so. "warning": it can, and its operator should know. "not tried":
            the text says why.
        code: what was checked: ``config``, ``node-config``, ``data``, ``test-part``, ``training``, ``round``,
            ``memory``, ``disk``, ``versions``, ``address``, ``certificate``, ``key``.
        text: what was found, and for a fault what to do.
    """

    level: Level
    code: str
    text: str


def ok(code: str, text: str) -> Finding:
    """Return a finding without objection."""
    return Finding("ok", code, text)


def warning(code: str, text: str) -> Finding:
    """Return what the operator should know."""
    return Finding("warning", code, text)


def fault(code: str, text: str) -> Finding:
    """Return what keeps the node from taking part."""
    return Finding("fault", code, text)


def untried(code: str, text: str) -> Finding:
    """Return what was not tried, and why."""
    return Finding("not tried", code, text)


@dataclass(frozen=True)
class Page:
    """All findings, in the order of the steps."""

    findings: tuple[Finding, ...]

    @property
    def faults(self) -> list[Finding]:
        """The faults."""
        return [finding for finding in self.findings if finding.level == "fault"]

    def to_json(self) -> dict[str, Any]:
        """Return the findings for programs; ``ready`` is whether there is no fault."""
        return {"ready": not self.faults, "findings": [asdict(finding) for finding in self.findings]}

    def __str__(self) -> str:
        """Return the page as text."""
        lines = []
        for finding in self.findings:
            head = f"{finding.level:<9}  {finding.code:<11}  "
            first, *others = finding.text.split("\n")
            lines += textwrap.wrap(first, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head)) or [head]
            lines += [" " * len(head) + other for other in others]
        levels = [finding.level for finding in self.findings]
        faults, warnings, untried_ = (levels.count(level) for level in ("fault", "warning", "not tried"))
        verdict = f"This node cannot take part: {faults} fault(s)" if faults else "No fault was found"
        return "\n".join([*lines, "", f"{verdict}; {warnings} warning(s), {untried_} not tried."])
