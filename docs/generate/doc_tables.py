"""Everything in the repository that is derived from the code: tables, pages and
defaults.

``python docs/generate [ROOT]``, from any folder, writes the derived files of a checkout
anew and prints which ones changed. After an error no file is changed. With ``--check``
it writes nothing and exits with 1 when a file is stale. ``make generate`` runs it. It is no part of the package: only a
checkout needs it.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import textwrap
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from doc_config import config_page
from doc_constructors import STUB, constructors
from doc_keys import KEYS, key_table
from doc_methods import method_pages, method_title, page_of
from doc_papers import papers_block, small_block
from doc_performance import compared_sentence, simulation_tables
from doc_picture import PICTURE, draw_report
from doc_pretrained import pretrained_block
from doc_privacy import privacy_table

from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.lab.config import GROUPS, Config
from fedbn_flwr.norms import NORMS
from fedbn_flwr.server.rounds.round import one_round
from fedbn_flwr.strategies import METHODS, STRATEGIES

__all__ = ["changed", "derived", "main"]

_ROOT = Path(__file__).resolve().parents[2]
_GROUPS = (
    "Statistics synchronised or frozen",
    "BN stays with the client",
    "Averages and local training",
    "Server optimizers",
)
_COLUMNS = ("BN", "GN", "FixBN", "FedTAN", "FedBN")
_TOML_HEAD = "[tool.flwr.app.config]\n"


def derived(root: Path) -> dict[Path, str]:
    """Return the text that each derived file of the checkout must have, by path below
    ``root``.

    Args:
        root: the checkout. What is not derived in a file is taken from there.
    """
    texts = {Path("docs/config.md"): config_page()} | method_pages(root)
    texts[STUB] = constructors()
    texts[KEYS] = key_table()
    pyproject = (root / "pyproject.toml").read_text(encoding="utf-8")
    texts[Path("pyproject.toml")] = _with_defaults(pyproject)
    marked = {
        "README.md": {"glance": glance_table(root)},
        "docs/methods/index.md": {
            "strategies": strategy_table(),
            "norms": norm_table(),
        },
        "docs/reference/python.md": {
            "classes": class_list(),
        },
        "docs/guides/pretrained.md": {"study": pretrained_block(root)},
        "docs/guides/privacy.md": {"protections": privacy_table()},
        "docs/add-a-strategy.md": {
            "one_round": source_of(one_round),
        },
        "docs/performance.md": {
            "compared": f"\n{compared_sentence(root)}\n",
        },
        "benchmarks/results.md": {"simulation": f"\n{simulation_tables(root)}\n"},
        "docs/results/papers.md": {
            "papers": papers_block(root),
            "small": small_block(root),
        },
    }
    for name, blocks in marked.items():
        texts[Path(name)] = _filled(root / name, blocks)
    texts[Path("mkdocs.yml")] = _filled(
        root / "mkdocs.yml", {"methods": method_menu()}, "      # {}"
    )
    return texts


def changed(root: Path) -> dict[Path, str]:
    """Return those of the derived files whose text is not the one they must have;
    method pages of no method, too.
    """
    texts = derived(root)
    stale = {
        path: text
        for path, text in texts.items()
        if not (root / path).exists()
        or (root / path).read_text(encoding="utf-8") != text
    }
    pages = {path.relative_to(root) for path in (root / "docs/methods").glob("*.md")}
    return stale | dict.fromkeys(sorted(pages - texts.keys()), "")


def source_of(function: Callable[..., Any]) -> str:
    """Return a block of a page with the source of a function, without its docstring."""
    source = textwrap.dedent(inspect.getsource(function))
    (defined,) = ast.parse(source).body
    assert isinstance(defined, ast.FunctionDef)
    doc, lines = defined.body[0], inspect.getsource(function).splitlines()
    code = [*lines[: doc.lineno - 1], *lines[doc.end_lineno :]]
    # A method keeps its indentation, which decides where its lines break.
    *classes, _ = function.__qualname__.split(".")
    code = [*(f"class {name}:" for name in classes), *code]
    return "\n".join(["```python no-run: a part of the package", *code, "```"])


def glance_table(root: Path) -> str:
    """Return the README's table of results; the rows and their numbers stand in
    ``docs/results/methods.yaml``.

    Raises:
        LookupError: no such method and case in a row's study.
    """
    results = yaml.safe_load(
        (root / "docs/results/methods.yaml").read_text(encoding="utf-8")
    )
    lines = [
        f"| setting | {' | '.join(_COLUMNS)} |",
        "|---|" + "---|" * len(_COLUMNS),
    ]
    for row in results["at-a-glance"]:
        cells = [
            _recorded(results, row["study"], *row[column]) if column in row else ""
            for column in _COLUMNS
        ]
        page = results["studies"][row["study"]]["page"]
        title = f"[{row['title']}](docs/results/{page})"
        lines.append("| " + " | ".join([title, *cells]) + " |")
    return "\n".join(lines)


def _recorded(
    results: Mapping[str, Any], study: str, method: str, case: str | None = None
) -> str:
    for row in results["methods"][method]:
        if row["study"] == study and row.get("case") == case:
            return (
                f"{row['here']}, {row['worst']}" if "worst" in row else str(row["here"])
            )
    raise LookupError(f"methods.yaml has no {study} of {method} with case {case!r}")


def strategy_table() -> str:
    """Return a table of the strategies: name, purpose, entries that stay with the client.

    The pages of the methods name the papers.
    """
    lines = [
        "| name | what it does | model entries that stay with the client |",
        "|---|---|---|",
    ]
    for name, strategy in STRATEGIES.items():
        kept = (
            ", ".join(part.value for part in Part if part in strategy().methods.local)
            or "nothing"
        )
        lines.append(
            f"| [`{name}`]({page_of(name)}) | {METHODS[name].summary_line} | {kept} |"
        )
    return "\n".join(line.replace("||", "\\|\\|") for line in lines)


def method_menu() -> str:
    """Return the methods' entries in the menu of the site, by group."""
    groups: dict[str, list[str]] = {group: [] for group in _GROUPS}
    for name, strategy in STRATEGIES.items():
        if page_of(name) == f"{name}.md":
            groups[_group_of(name)].append(
                f"          - {method_title(strategy)}: methods/{name}.md"
            )
    lines = []
    for group, entries in groups.items():
        lines += [f"      - {group}:", *entries]
    return "\n".join(lines)


def _group_of(name: str) -> str:
    """Return the group of a method, by what it declares."""
    method = METHODS[name](METHODS[name].Params())
    phases = method.declared
    statistics = any(phase.exchanges or phase.frozen for phase in phases)
    if method.role == "server-step":
        return "Server optimizers"
    if any(phase.local for phase in phases):
        return "BN stays with the client"
    if statistics:
        return "Statistics synchronised or frozen"
    return "Averages and local training"


def norm_table() -> str:
    """Return a table of the norms: name, what it is, source."""
    rows = [
        f"| `{name}` | {info.summary} | {info.source} |" for name, info in NORMS.items()
    ]
    return "\n".join(["| norm | what it is | source |", "|---|---|---|", *rows])


def class_list() -> str:
    """Return the directives that show the strategies' classes, each with a link to the
    method's page.
    """
    lines = []
    for name, strategy in STRATEGIES.items():
        lines += [
            "",
            f"::: fedbn_flwr.strategies.{strategy.__name__}",
            "    options:",
            "      members: false",
            "",
        ]
        lines += [f"[{method_title(strategy)}](../methods/{page_of(name)})"]
    return "\n".join([*lines, ""])


def _with_defaults(pyproject: str) -> str:
    """Return the text of ``pyproject.toml`` with every config key and its default."""
    before, rest = pyproject.split(_TOML_HEAD)
    values = {
        field.alias or name: field.default
        for name, field in Config.model_fields.items()
    }
    lines = []
    for group in GROUPS:
        lines += [
            f"# {group}",
            *(f"{key} = {json.dumps(values[key])}" for key in Config.keys(group)),
        ]
    after = rest.find("\n[")
    return (
        before
        + _TOML_HEAD
        + "\n".join(lines)
        + "\n"
        + (rest[after:] if after >= 0 else "")
    )


def _filled(path: Path, blocks: Mapping[str, str], mark: str = "<!-- {} -->") -> str:
    """Return the file's text with new content between the marks of each block.

    Raises:
        ValueError: the file has no such pair of marks.
    """
    text = path.read_text(encoding="utf-8")
    for name, content in blocks.items():
        start, end = mark.format(name) + "\n", mark.format("/" + name) + "\n"
        if text.count(start) != 1 or text.count(end) != 1:
            raise ValueError(
                f"{path} must have {start.strip()!r} and {end.strip()!r} once each, on"
                " lines of their own"
            )
        before, rest = text.split(start)
        text = f"{before}{start}{content}\n{end}{rest.split(end)[1]}"
    return text


def main(arguments: list[str] | None = None) -> int:
    """Write or check the derived files; return the exit code."""
    parser = argparse.ArgumentParser(prog="python docs/generate", description=__doc__)
    parser.add_argument(
        "root",
        nargs="?",
        type=Path,
        default=_ROOT,
        help="the checkout; default: this file's",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="change nothing; exit with 1 if a file is stale",
    )
    options = parser.parse_args(arguments)
    if options.check:
        stale = changed(options.root)
        for path in stale:
            print(f"stale: {path}")
        print(f"{len(stale)} derived files are stale. Run `make generate`.")
        return int(bool(stale))
    before: dict[Path, bytes | None] = {}
    try:
        _write_all(options.root, before)
    except BaseException as error:
        for path, content in before.items():
            _put(path, content)
        if not isinstance(error, Exception):
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        print(
            f"Nothing is changed: {type(error).__name__} in {place.filename}, line"
            f" {place.lineno}: {error}"
        )
        return 1
    written = [path for path, content in before.items() if content != _content(path)]
    for path in written:
        print(f"written: {path.relative_to(options.root)}")
    print(f"{len(written)} derived files have changed; all are up to date.")
    return 0


def _write_all(root: Path, before: dict[Path, bytes | None]) -> None:
    """Write the derived files, and note in ``before`` the content of each before that.

    A file without content does not exist.
    """

    def write(name: Path, text: str) -> None:
        path = root / name
        before.setdefault(path, _content(path))
        _put(path, text.encode() or None)

    for name, text in changed(root).items():
        write(name, text)
    before[root / PICTURE] = _content(root / PICTURE)
    draw_report(root)


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _put(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
