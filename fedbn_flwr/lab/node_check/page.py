"""The result of a node's check as one page of findings."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Literal

_WIDTH = 110


@dataclass(frozen=True)
class StepFinding:
    """The finding of one step of the check.

    Attributes:
        level: "ok"; "fault" if the node cannot take part in this state; "warning" if it
            can, but its operator should read the text; "not tried" if the step was left
            out, with the reason in the text.
        code: the subject of the check: ``config``, ``node-config``, ``data``,
            ``test-part``, ``training``, ``address``, ``certificate``, ``key``.
        text: the finding, and the remedy of a fault.
    """

    level: Literal["ok", "warning", "fault", "not tried"]
    code: str
    text: str


@dataclass(frozen=True)
class Page:
    """All findings, in the order of the steps."""

    findings: tuple[StepFinding, ...]

    @property
    def faults(self) -> list[StepFinding]:
        """The faults."""
        return [finding for finding in self.findings if finding.level == "fault"]

    def __str__(self) -> str:
        """Return the page as text."""
        lines = []
        for finding in self.findings:
            # Wrap only the first line of a text, because the other lines may be a
            # table.
            head = f"{finding.level:<9}  {finding.code:<11}  "
            indent = " " * len(head)
            first, *others = finding.text.split("\n")
            wrapped = textwrap.wrap(
                first, _WIDTH, initial_indent=head, subsequent_indent=indent
            )
            lines += wrapped or [head]
            lines += [indent + other for other in others]
        verdict = "No fault was found."
        if self.faults:
            verdict = f"This node cannot take part: {len(self.faults)} fault(s)."
        return "\n".join([*lines, "", verdict])
