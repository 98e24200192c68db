"""All problems of declared values, from the syntax trees of the package."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import fedbn_flwr

__all__ = ["CATEGORIES", "Row", "problem_rows"]

PACKAGE = Path(fedbn_flwr.__file__).parent
CATEGORIES = frozenset({"bad-value", "no-effect", "unknown-key"})
"""The codes that decisions about any key share; ``key`` names the subject."""
FOUND = "found in the work"
"""The stage of a coded error that is not a row."""
_DEFAULTS: Mapping[str, dict[str, str]] = {
    "Problem": {"keys": "", "stage": "run", "effect": "refuse", "remedy": ""},
    "_misfit": {"keys": "strategy", "stage": "model", "effect": "refuse"},
    "_unused": {"stage": "settings", "effect": "no-effect", "remedy": ""},
    "ConfigError": {"keys": "", "stage": FOUND, "effect": "refuse", "remedy": ""},
}
_POSITIONS = {
    "Problem": ("code", "text", "keys", "stage", "effect", "remedy"),
    "_misfit": ("code", "text", "remedy", "keys"),
    "_unused": ("code", "text", "keys"),
    "ConfigError": ("text",),
}

_SIGNS = ("code=", *(f"{name}(" for name in _POSITIONS if name != "ConfigError"))


@dataclass(frozen=True)
class Row:
    """A problem in the source; texts are templates."""

    code: str
    text: str
    keys: str
    stage: str
    effect: str
    remedy: str
    file: str


@functools.cache  # the trees of the package take a second
def problem_rows() -> list[Row]:
    """Return each problem of the package that has a code of its own, or shares one."""
    rows = []
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        text = path.read_text(encoding="utf-8")
        if not any(sign in text for sign in _SIGNS):  # to parse all files takes seconds
            continue
        tree = ast.parse(text)
        texts: dict[str, str] = {}
        for node in _in_order(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                texts[node.targets[0].id] = _text(node.value, texts)
            name = getattr(getattr(node, "func", None), "id", "")
            if isinstance(node, ast.Call) and name in _POSITIONS:
                given = dict(zip(_POSITIONS[name], node.args, strict=False))
                given |= {word.arg: word.value for word in node.keywords if word.arg}
                if not isinstance(given.get("code"), ast.Constant):
                    continue
                values = {key: _text(value, texts) for key, value in given.items()}
                fields = _DEFAULTS[name] | values
                rows.append(Row(file=file, **{key: fields[key] for key in _COLUMNS}))
    return rows


_COLUMNS = ("code", "text", "keys", "stage", "effect", "remedy")


def _in_order(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes in the order of the source."""
    for child in ast.iter_child_nodes(tree):
        yield child
        yield from _in_order(child)


def _text(node: ast.AST, texts: Mapping[str, str]) -> str:
    """Return a constant, or the template of an f-string or of a variable."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, texts) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        value = ast.unparse(node.value)
        return texts[value] if value.isupper() and value in texts else f"{{{value}}}"
    if isinstance(node, ast.Name):
        return texts.get(node.id, f"{{{node.id}}}")
    return f"{{{ast.unparse(node)}}}"
