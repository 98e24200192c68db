"""The commands and programs of README and of every page, in their order, in one clone.

    python benchmarks/pages.py                      # in a clone of the last commit, deleted at the end
    python benchmarks/pages.py --clone runs/clone   # in this clone, made if it is not there, which stays
    python benchmarks/pages.py --only docs/guides --also managed   # some pages; blocks whose reason has this word, too
    python benchmarks/pages.py --at-once            # commands are forks of one process, which has torch imported

The order is README's, that of the site's navigation, then the texts beside it. A block
with a reason not to be run is named with it. What a page says that a block prints must
be printed. At the end git must see nothing new, no page may have changed the files of
another, and everything lies in the folder ``runs``. The environment is the one of this
program. Processes that outlive their block are ended.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.support import preloaded  # noqa: E402

FOLDER = "runs"
"""The folder of all files that pages write; git ignores it."""
BESIDE = ("CONTRIBUTING.md", "CHANGELOG.md", "studies/README.md")
_FENCE = re.compile(
    r"^```(?P<language>\w*)(?P<tag>.*)\n(?P<fenced>(?:.*\n)*?)```$"
    r"|^ *\*\*Command:\*\* `(?P<command>[^`]+)`$",
    re.MULTILINE,
)
_WRITES = re.compile(
    r"--out[= ](\S+)|\bout='([^']+)'|^(?:cat|echo|printf|docker)\b.* >>? (\S+)|^mkdir (?:-p )?(\S+)",
    re.MULTILINE,
)
_PLACEHOLDER = re.compile(r"[A-Z]+[A-Z_0-9]*")
_MARK = "FEDBN_FLWR_PAGES"


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, or the command of a method's page.

    Attributes:
        page: the page's path from the root of the repository.
        line: where the block begins.
        language: that of the fence; "command" for a method's command.
        reason: why it is not run, or "".
        text: what is within.
    """

    page: str
    line: int
    language: str
    reason: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def program(self) -> list[str]:
        """The arguments of the process that runs it; empty for what does not run."""
        if self.language == "python":
            return ["python", "-c", self.text]
        if self.language in ("sh", "command"):
            return ["bash", "-euo", "pipefail", "-c", self.text]
        return []


def pages(root: Path = ROOT) -> list[Path]:
    """Return README, the pages of the site in the order of its navigation, and the
    texts beside it.
    """
    navigation = (root / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    site = re.findall(r"[\w/-]+\.md$", navigation, re.MULTILINE)
    names = ["README.md", *(f"docs/{name}" for name in site), *BESIDE]
    return [root / name for name in names]


def blocks(root: Path = ROOT) -> list[Block]:
    """Return the blocks of all pages in their order."""
    found = []
    for page in pages(root):
        text, name = page.read_text(), str(page.relative_to(root))
        for match in _FENCE.finditer(text):
            line = text[: match.start()].count("\n") + 1
            language, body = match["language"], match["fenced"]
            if match["command"]:
                language, body = "command", match["command"]
            tag = (match["tag"] or "").strip()
            if tag and not tag.startswith("no-run: "):
                raise ValueError(f"{name}:{line}: {tag}")
            found.append(
                Block(name, line, language, tag.removeprefix("no-run: "), body)
            )
    return found


def shown_after(block: Block, among: Iterable[Block]) -> str:
    """Return the text that a page shows as what the block prints, or ""."""
    for other in among:
        if other.page == block.page and other.line > block.line:
            return other.text if other.language == "text" else ""
    return ""


def written(text: str) -> set[str]:
    """Return the paths that commands in a text write to, without placeholders."""
    found = set()
    for groups in _WRITES.findall(text):
        path = "".join(groups).strip("`'\".,;)").removeprefix("$PWD/")
        if not _PLACEHOLDER.fullmatch(path.partition("/")[0].partition(".")[0]):
            found.add(path)
    return found


def missing(shown: str, printed: str) -> list[str]:
    """Return the lines that a page shows and a program has not printed; "..." stands
    for any text.
    """
    lines = [line.strip() for line in printed.splitlines()]
    found = []
    for line in map(str.strip, shown.splitlines()):
        pattern = re.escape(line).replace(re.escape("..."), ".*")
        if line and not any(re.search(pattern, other) for other in lines):
            found.append(line)
    return found


def _free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


class Course:
    """A clone in which blocks run one after the other.

    Args:
        clone: the folder of the clone.
        home: an empty folder, the user's home of the blocks.
    """

    def __init__(self, clone: Path, home: Path) -> None:
        self.clone = clone
        self._mark = uuid.uuid4().hex
        self._environment = {
            **os.environ,
            _MARK: self._mark,
            "HOME": str(home),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(clone),
            "PYTHONPYCACHEPREFIX": str(home / "pycache"),
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": _free_port(),
            "FLWR_LOCAL_CONTROL_API_PORT": _free_port(),
        }
        self._environment.pop("FLWR_HOME", None)
        if not clone.exists():
            subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
            link = clone / ".venv"
            link.symlink_to(sys.prefix)
            with (clone / ".git/info/exclude").open("a") as exclude:
                exclude.write(f"/{link.name}\n")

    def take_commands_from(self, folder: Path) -> None:
        """Let the commands of a folder come before those of the environment."""
        self._environment["PATH"] = f"{folder}:{self._environment['PATH']}"

    def run(self, block: Block) -> tuple[int, str]:
        """Run a block and return its exit code and what it printed."""
        done = subprocess.run(
            block.program,
            cwd=self.clone,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.returncode, done.stdout

    def end_what_is_left(self) -> int:
        """End the processes that blocks have left, and return their number."""
        left = list(self._left())
        for process in left:
            os.kill(process, signal.SIGTERM)
        return len(left)

    def _left(self) -> Iterator[int]:
        for process in Path("/proc").iterdir():
            if process.name.isdigit() and int(process.name) != os.getpid():
                try:
                    environment = (process / "environ").read_bytes()
                except OSError:  # another user's process, or it has ended
                    continue
                if f"{_MARK}={self._mark}".encode() in environment:
                    yield int(process.name)

    def files(self) -> dict[str, int]:
        """Return when each file that pages have written has changed."""
        found = {}
        for path in (self.clone / FOLDER).rglob("*"):
            if path.is_file():
                found[str(path.relative_to(self.clone))] = path.stat().st_mtime_ns
        return found

    def beside(self) -> list[str]:
        """Return what git sees, or would see without ``.gitignore``, outside ``runs``."""
        command = ["git", "status", "--short", "--ignored"]
        done = subprocess.run(
            command, cwd=self.clone, capture_output=True, text=True, check=True
        )
        expected = {f"!! {FOLDER}/", "!! .venv"}
        lines = done.stdout.splitlines()
        # Python's cache of compiled modules does not belong to a page.
        return [
            one for one in lines if one not in expected and "__pycache__" not in one
        ]


def faults_of(course: Course, block: Block, shown: str) -> list[str]:
    """Run a block, print what it printed, and return what is wrong."""
    start = time.monotonic()
    code, printed = course.run(block)
    seconds = time.monotonic() - start
    faults = [f"not printed: {line}" for line in missing(shown, printed)]
    if code:
        faults.append(f"exit code {code}")
    if left := course.end_what_is_left():
        printed += f"{left} processes were ended\n"
    print(f"{block}: {seconds:.0f} s", *faults, sep="; ")
    print(re.sub(r"^", "    ", printed.rstrip(), flags=re.MULTILINE), flush=True)
    return [f"{block}: {fault}" for fault in faults]


def walk(course: Course, wanted: Sequence[Block], also: Sequence[str]) -> list[str]:
    """Run the blocks in their order and return what is wrong."""
    wrong = []
    for page, of_page in groupby(wanted, lambda block: block.page):
        before = course.files()
        for block in of_page:
            if block.reason and not any(word in block.reason for word in also):
                print(f"{block}: not run: {block.reason}", flush=True)
            elif block.program:
                wrong += faults_of(course, block, shown_after(block, wanted))
        after = course.files()
        for name, changed in before.items():
            if after.get(name) != changed:
                wrong.append(f"{page}: another page's file changed: {name}")
    return wrong + [f"beside {FOLDER}: {line}" for line in course.beside()]


def main(
    clone: Annotated[
        Path | None, typer.Option(help="folder of the clone; it is kept")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="pages whose path begins with this; repeatable"),
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            help="also run blocks with this text in the reason not to run them"
        ),
    ] = None,
    at_once: Annotated[
        bool,
        typer.Option(
            "--at-once", help="fork the commands, so that torch is imported once"
        ),
    ] = False,
) -> None:
    """Run every block of README and the pages in their order in one clone."""
    asked = tuple(only or ("",))
    wanted = [block for block in blocks() if block.page.startswith(asked)]
    with (
        tempfile.TemporaryDirectory(prefix="pages-") as folder,
        ExitStack() as stack,
    ):
        home = Path(folder, "home")
        home.mkdir()
        course = Course(clone.absolute() if clone else Path(folder, "clone"), home)
        if at_once:
            forks = preloaded.commands(Path(folder), course.clone)
            course.take_commands_from(stack.enter_context(forks))
        wrong = walk(course, wanted, also or ())
    print(*wrong or ["every block ran, and no other file is left"], sep="\n")
    raise typer.Exit(bool(wrong))


if __name__ == "__main__":
    typer.run(main)
