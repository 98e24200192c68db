"""What the benchmarks share: turns, medians, machine and commit, tables in Markdown and
their place on a page.
"""

from __future__ import annotations

import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("docs/performance.md", "benchmarks/results.md")
"""Where the tables go; a change there is none of what was measured."""

Numbers = dict[str, list[float]]

_PYPROJECT = """[project]
name = "{name}"
version = "1.0.0"
description = "a benchmark"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedbn"

[tool.flwr.app.components]
serverapp = "{server}:server_app"
clientapp = "{client}:client_app"

[tool.flwr.app.config]
{config}
"""


def flower_project(name: str, server: str, client: str, config: str) -> str:
    """Return the ``pyproject.toml`` of a Flower app: the modules of its two parts, and
    its config in TOML.
    """
    return _PYPROJECT.format(
        name=name, server=server, client=client, config=config.strip()
    )


def in_turns(ways: Mapping[str, Callable[[], Sequence[float]]], turns: int) -> Numbers:
    """Return what each way gives, over all turns; every other turn runs in reverse
    order.

    Load and temperature of the machine drift; in turns they meet all ways alike.
    """
    found: Numbers = {name: [] for name in ways}
    for turn in range(turns):
        for name in list(ways)[:: 1 if turn % 2 == 0 else -1]:
            found[name] += ways[name]()
            middle = statistics.median(found[name]) if found[name] else float("nan")
            print(
                f"turn {turn + 1} of {turns}, {name}: {middle:.3f}",
                file=sys.stderr,
                flush=True,
            )
    return found


def machine() -> str:
    """Return the processor, cores, memory and the versions that matter, in one line."""
    import torch

    model, memory = platform.processor() or platform.machine(), ""
    if (cpuinfo := Path("/proc/cpuinfo")).exists():
        names = re.findall(r"^model name\s*: (.+)$", cpuinfo.read_text(), re.MULTILINE)
        model = names[0] if names else model
    if (meminfo := Path("/proc/meminfo")).exists():
        kilobytes = int(meminfo.read_text().split()[1])
        memory = f", {kilobytes / 2**20:.0f} GiB"
    packages = f"torch {torch.__version__}, flwr {version('flwr')}"
    cores = f"{torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores"
    return f"{model}, {cores}{memory}, Python {platform.python_version()}, {packages}"


def commit(folder: Path = ROOT) -> str:
    """Return the commit of a checkout, short, with a note if files differ from it; ""
    where it is none.

    A folder without git may name its commit in a file ``.commit``.
    """
    if (note := folder / ".commit").exists():
        return note.read_text().strip()[:7]
    git = ["git", "-C", str(folder)]
    answer = subprocess.run(
        [*git, "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True
    )
    if answer.returncode:
        return ""
    status = [
        *git,
        "status",
        "--porcelain",
        "--untracked-files=no",
        "--",
        ".",
        *(f":!{page}" for page in PAGES),
    ]
    changed = subprocess.run(status, capture_output=True, text=True).stdout.strip()
    return answer.stdout.strip() + (" with changes" if changed else "")


def facts() -> str:
    """Return the line below each table: commit and machine."""
    return f"Commit {commit() or 'unknown'}; {machine()}."


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first column is text, the others are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with ``digits`` significant digits, without an exponent; "-" for
    None.
    """
    if value is None or value != value:
        return "-"
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:,.{max(0, digits - whole)}f}"


def write_block(page: Path, name: str, text: str) -> None:
    """Replace what stands between ``<!-- name -->`` and ``<!-- /name -->`` on a page.

    Raises:
        ValueError: the page does not have these two lines once each.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    whole = page.read_text()
    if whole.count(begin) != 1 or whole.count(end) != 1:
        raise ValueError(
            f"{page} needs the lines {begin.strip()} and {end}, once each, around the"
            " place of the table"
        )
    before, _, rest = whole.partition(begin)
    partial = page.with_name(page.name + ".partial")
    partial.write_text(
        f"{before}{begin}\n{text.strip()}\n\n{end}{rest.partition(end)[2]}"
    )
    os.replace(partial, page)


MARK = "FEDBN_BENCHMARK"
"""An environment variable of what a benchmark starts, by which all its processes are
found.
"""


def marked(name: str) -> list[int]:
    """Return the processes whose environment has this value of ``MARK``."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{MARK}={name}".encode() in (
                entry / "environ"
            ).read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # another user's process, or it has ended
            continue
    return found
