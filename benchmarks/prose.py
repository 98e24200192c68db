"""Count patterns that make prose hard to read, and compare the score with a limit.

::

    python benchmarks/prose.py                     # the scores, checked against LIMITS
    python benchmarks/prose.py --base main         # and each changed file, before and after
    python benchmarks/prose.py --show P3 --path server

The script reads ``fedbn_flwr/**/*.py`` (docstrings, comments, messages, help texts),
``docs/**/*.md``, README and CONTRIBUTING (sentences and cells of tables). The score is
the number of hits per 1,000 words. The patterns are regular expressions, and each has
false hits: the score is a thermometer, and a sentence without a hit can still be hard.
P10 and P17 are not in the score, because Flower and torch have as many of them.
"""

from __future__ import annotations

import argparse
import ast
import io
import pathlib
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]

REL = r"(?:which|whose|whom|who|that|what|where)"

# name -> (regex, scopes, description); without scopes, the pattern counts in all texts
PATTERNS: dict[str, tuple[str, tuple[str, ...] | None, str]] = {
    "P1 that-of": (
        r"\b(?:that|those) (?:of|in|for|with|from|which|who)\b",
        None,
        "pronoun instead of the noun: 'that of', 'those of'",
    ),
    "P2 one(s)": (
        r"\bones\b|\b(?:another|other|the|own|such|earlier|later|first|last|inner|outer"
        r"|further|new|this|that|running|second) one(?= ?(?:$|[.,;:)]|and\b|or\b"
        r"|is\b|are\b|has\b|of\b|that\b|which\b|in\b|by\b|for\b|with\b|without\b))",
        None,
        "'one', 'ones' instead of the noun",
    ),
    "P3 what-clause": (
        r"\b[Ww]hat (?:it|they|he|a|an|the|no|each|this|its|their|is|are|was|were|has|have"
        r"|does|did|do|travels?|comes?|goes|leaves|clients?|users?|methods?|privacy|may"
        r"|must|can|only|one|else|follows|helps|helped|happens|takes?|stays|looks|tells"
        r"|raises|counts|needs?|several|models?|[a-z]+s)\b(?![^.?!]*\?)",
        None,
        "a 'what' clause instead of a noun ('what it raises', 'what travels')",
    ),
    "P4 say/tell/know": (
        r"\b(?:say|says|said|tell|tells|told|know|knows|speaks?|unsaid)\b",
        None,
        "objects that say, tell, know (postposed ', say' included)",
    ),
    "P5 stand/lie/hold/go by": (
        r"\b(?:stands?|stood|lies|lie|go(?:es)? by|hold|holds|wants?|go(?:es)? on|went on"
        r"|lives?|belongs? (?:in|into)|brings?|knows? of)\b",
        None,
        "abstract verb instead of the exact one (hold, stand, lie, go by, want, go on)",
    ),
    "P6 where-for-if": (
        r"(?:^|[^\w ]\s|[a-z)`'\d] )(?:[Ww]here)(?= (?!:math|X |it is\.|to\b))",
        None,
        "'where' for 'if', 'when', 'because' or 'in which'",
    ),
    "P7 comma-which": (
        r", (?:(?:in|of|by|from|with|on|to|for|at|under|through|without|after|before|behind"
        r"|above|below|as)\s)?(?:which|whose|whom)\b|, who\b|, as of\b|, as (?:for|in|with)"
        r"\b",
        None,
        "comma + which/whose/in which, or ', as of'",
    ),
    "P8 three relatives": (
        "SENTENCE:relatives",
        None,
        "three or more of which/that/whose/who/what/where in one sentence",
    ),
    "P9 fronted, no comma": (
        r"(?:^|[.:;?!] )(?:Of|In|By|With|Without|Under|From|For|Behind|Before|After|Over|On"
        r"|At|Beside|Besides|Until|Through|Among|Between|Where|If|As)(?: (?!to\b)[^\s,.;:]+){3,12} "
        r"(?:the|a|an|it|they|each|all|no|this|its|is|are|has|have|may|can|does|do|must)\b"
        r"(?<!, the)",
        None,
        "sentence that opens with a phrase or clause and no comma after it",
    ),
    "P10 colon chain": (
        "SENTENCE:colons",
        None,
        "two or more of ':' ';' in one sentence",
    ),
    "P11 is no / are no": (
        r"\b(?:is|are|was|were) (?:no|none)\b (?!longer\b|more\b|such\b)",
        None,
        "'is no data set' for 'is not a data set'; 'are none of'",
    ),
    "P12 needed (no verb)": (
        r"(?<!is )(?<!are )(?<!not )(?<!be )(?<!was )(?<!were )\bneeded\b(?=[.;,)]|$| \()",
        None,
        "verbless 'N needed', 'one each needed'",
    ),
    "P13 alone/anew/beside": (
        r"\balone\b|\banew\b|\bbesides?\b|, too\b|\bat once\b|\bin place of\b|\bin the place"
        r" of\b|\bsay[,.)]|, say\b|\bby itself\b|\bfor it\b",
        None,
        "adverb at the end or calque: alone (= only), anew, beside, ', too', in place of",
    ),
    "P14 also-": (
        r"\b[Aa]lso (?:where|if|when|in|with|after|for|by|through|under|without|the|a|of)\b",
        None,
        "'also where', 'also through': even, including",
    ),
    "P15 x = meaning": (
        r"(?:^|[;:.,(] ?)(?:None|True|False|empty|\(\)|\"[^\" ]*\"|'[^' ]*'|-?\d+) = \w",
        ("summary", "docstring", "message", "help"),
        "'None = any' in place of a clause",
    ),
    "P16 relation prefix": (
        r"\b(?:by|in|of|to|from|with|for|at|on|under|through) (?:which|whom|whose|what)\b",
        None,
        "preposition + which/what ('by which', 'of what')",
    ),
    "P17 verbless comment": (
        r"^(?:As|Also|Of|Else|Once|From|In|With|Without|For|By|Not|Nor|To|At|On|Before|After"
        r"|Beside|Besides|Behind|Under)\b[^.;:]{0,90}$|^[a-z][^.:;]*: ",
        ("comment",),
        "comment that is a fragment",
    ),
    "P18 summary too full": (
        "SUMMARY",
        ("summary",),
        "docstring first line over 79 characters, or with ';', ':' or ', which/whose'",
    ),
    "P19 so / then / it all": (
        r"\b(?:is|are|stays?|stay|does|do|remains?) so\b|\bso does\b|\band so (?:is|are|do"
        r"|does)\b|\bdo(?:es)? not they\b|\ball it\b|\bthe same\b(?= for| with|[.;,])"
        r"|\bas (?:it|they) (?:is|are|was|were)\b|\bas usual\b",
        None,
        "'so', 'the same', 'as it is' standing for a whole predicate",
    ),
}


# These patterns are counted, but not in the score, because Flower and torch have as
# many hits.
CONTEXT = ("P10", "P17")


class Text(NamedTuple):
    """A piece of prose, such as a summary line, a comment or a cell of a table."""

    scope: str
    path: str
    line: int
    text: str


Belongs = Callable[[Text], bool]
# largest allowed number of hits per 1,000 words, and the texts that are counted
LIMITS: dict[str, tuple[float, Belongs]] = {
    "package": (5, lambda item: item.path.startswith("fedbn_flwr")),
    "pages": (6, lambda item: item.path.endswith(".md")),
    "tests": (5, lambda item: item.path.startswith("tests")),
    "help texts": (5, lambda item: item.scope == "help"),
    "messages": (4, lambda item: item.scope == "message"),
}


def literal(node: ast.AST) -> str | None:
    """The text of a string expression, {x} for its values."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(v.value) if isinstance(v, ast.Constant) else "{x}" for v in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = literal(node.left), literal(node.right)
        if left or right:
            return (left or "{x}") + (right or "{x}")
    if isinstance(node, ast.IfExp):
        return literal(node.body) or literal(node.orelse)
    return None


def clean(text: str) -> str:
    text = re.sub(r"``[^`]*``|`[^`]*`|\$[^$]*\$", "X", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"https?://\S+|arXiv:\S+", "X", text)
    return re.sub(r"\s+", " ", text).strip()


def paragraphs(doc: str) -> Iterator[tuple[int, str]]:
    """Paragraphs of a docstring with their line offset; code blocks left out."""
    block: list[str] = []
    start, code = 0, False
    lines = doc.split("\n")
    for number, line in enumerate([*lines, ""]):
        bare = line.strip()
        indented = len(line) - len(line.lstrip())
        if code and (not bare or indented >= 4):
            continue
        code = False
        begins = re.match(r"\*{0,2}\w+: |[-*] |\d+\. ", bare) is not None
        if (
            not bare
            or begins
            or re.fullmatch(r"(Args|Returns|Raises|Attributes|Yields):", bare)
        ):
            if block:
                yield start, " ".join(block)
            block = (
                []
                if not begins
                else [re.sub(r"^(\*{0,2}\w+: |[-*] |\d+\. )", "", bare)]
            )
            start = number
            if lines[number - 1].strip().endswith("::") if number else False:
                code = True
            continue
        if bare == "::" or bare.startswith(">>>"):
            code = True
            if block:
                yield start, " ".join(block)
            block = []
            continue
        if not block:
            start = number
        block.append(bare)


HELP_CALLS = (
    "key",
    "Option",
    "Argument",
    "typer.Option",
    "typer.Argument",
    "Field",
    "setting",
)
LOG = ("logger.warning", "logger.info", "logger.error", "warnings.warn", "_log.warning")


def of_python(source: str, name: str) -> Iterator[Text]:
    """Read docstrings, comments, messages and help texts."""
    tree = ast.parse(source)
    seen: set[tuple[int, str]] = set()
    for node in ast.walk(tree):
        if isinstance(
            node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        ):
            doc = ast.get_docstring(node)
            if doc:
                at = node.body[0].lineno
                for number, (offset, para) in enumerate(paragraphs(doc)):
                    yield Text(
                        "summary" if not number else "docstring",
                        name,
                        at + offset,
                        para,
                    )
        calls: list[tuple[str, ast.Call]] = []
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in HELP_CALLS or called.endswith((".Option", ".Argument")):
                calls.append(("help", node))
            elif (
                called in LOG
                or called.split(".")[-1].endswith(("Error", "Problem", "Warning"))
                or called in ("refuse", "warn")
            ):
                calls.append(("message", node))
        for scope, call in calls:
            values = [*call.args, *(k.value for k in call.keywords)]
            for value in values:
                found = literal(value)
                if (
                    found
                    and len(found.split()) > 3
                    and (value.lineno, found) not in seen
                ):
                    seen.add((value.lineno, found))
                    yield Text(scope, name, value.lineno, found)
        if isinstance(node, (ast.Yield, ast.Return)) and node.value is not None:
            found = literal(node.value)
            if found and len(found.split()) > 6 and (node.lineno, found) not in seen:
                seen.add((node.lineno, found))
                yield Text("message", name, node.lineno, found)
    # Join neighbouring lines of comments into one text.
    block: list[str] = []
    start = last = -9
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        text = token.string.lstrip("#").strip()
        if re.match(r"(type:|noqa|pragma|!|---|mypy|ruff)", text):
            continue
        text = re.sub(r"\s*# type:.*", "", text)
        alone = not source.split("\n")[token.start[0] - 1][: token.start[1]].strip()
        if block and token.start[0] == last + 1 and alone:
            block.append(text)
        else:
            if block:
                yield Text("comment", name, start, " ".join(block))
            block, start = [text], token.start[0]
        last = token.start[0]
    if block:
        yield Text("comment", name, start, " ".join(block))


def of_markdown(source: str, name: str) -> Iterator[Text]:
    """Read sentences and cells of tables."""
    fence = comment = False
    block: list[str] = []
    start = 0
    for number, line in enumerate([*source.split("\n"), ""], 1):
        bare = line.strip()
        if bare.startswith("```"):
            fence = not fence
            bare = ""
        elif fence:
            continue
        if bare.startswith("<!--"):
            comment = "-->" not in bare
            bare = ""
        elif comment:
            comment = "-->" not in bare
            continue
        if bare.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", bare):
                if len(cell.split()) > 3:
                    yield Text("table", name, number, cell.strip())
            bare = ""
        ends = (
            not bare
            or bare.startswith(("#", "- ", "* ", "!", "<", "$$", "---"))
            or re.match(r"\d+\. ", bare)
        )
        if ends:
            if block:
                yield Text("page", name, start, " ".join(block))
            block = []
            start = number
            if bare.startswith(("- ", "* ")) or re.match(r"\d+\. ", bare):
                block = [re.sub(r"^([-*]|\d+\.) ", "", bare)]
            continue
        if not block:
            start = number
        block.append(bare)


def sentences(text: str) -> list[str]:
    return [s for s in re.split(r"(?<=[.?!])\s+(?=[A-Z`\"(*\[X])", text) if s]


def hits(pattern: str, item: Text) -> list[str]:
    regex, scopes, _ = PATTERNS[pattern]
    if scopes and item.scope not in scopes:
        return []
    text = clean(item.text)
    if regex == "SENTENCE:relatives":
        return [
            s for s in sentences(text) if len(re.findall(rf"\b{REL}\b", s, re.I)) >= 3
        ]
    if regex == "SENTENCE:colons":
        return [s for s in sentences(text) if len(re.findall(r"[;:](?=\s)", s)) >= 2]
    if regex == "SUMMARY":
        raw = re.sub(r"\s+", " ", item.text)
        full = len(raw) > 79 or re.search(
            r"[;:] |, (?:which|whose|of which|in which)", text
        )
        return [raw] if full else []
    return [m.group(0) for m in re.finditer(regex, text)]


def read(root: pathlib.Path) -> list[Text]:
    """Return the texts of the package, the tests and the pages below ``root``."""
    pages = [*sorted((root / "docs").rglob("*.md")), root / "README.md"]
    code = [p for room in ("fedbn_flwr", "tests") for p in (root / room).rglob("*.py")]
    files = [*sorted(code), *pages]
    found: list[Text] = []
    for path in [*files, root / "CONTRIBUTING.md"]:
        found += of_file(str(path.relative_to(root)), path.read_text(encoding="utf-8"))
    return found


def of_file(name: str, source: str) -> list[Text]:
    """Return the texts of one file."""
    return list((of_python if name.endswith(".py") else of_markdown)(source, name))


def score(items: list[Text]) -> float:
    """Return the hits per 1,000 words."""
    words = sum(len(clean(item.text).split()) for item in items)
    counted = [name for name in PATTERNS if name.split()[0] not in CONTEXT]
    found = sum(len(hits(name, item)) for item in items for name in counted)
    return 1000 * found / max(words, 1)


def git(*arguments: str) -> str:
    """Return the output of a git command; empty if git fails."""
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout


def compare(base: str, items: list[Text]) -> None:
    """Print the score of each file that differs from commit ``base``."""
    for name in git("diff", "--name-only", base).splitlines():
        after = [item for item in items if item.path == name]
        if after:
            before = of_file(name, git("show", f"{base}:{name}"))
            print(f"{score(before):6.1f} -> {score(after):5.1f}  {name}")


def main() -> int:
    """Print the scores; return 1 if one is above its limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--base", default="HEAD", help="commit of the scores before")
    parser.add_argument("--show", default="", help="print the hits of a pattern: P3")
    parser.add_argument("--path", default="", help="only files with this text in them")
    options = parser.parse_args()
    items = [item for item in read(ROOT) if options.path in item.path]
    if options.show:
        name = next(name for name in PATTERNS if name.split()[0] == options.show)
        for item in items:
            if hits(name, item):
                print(f"{item.path}:{item.line}: [{item.scope}] {clean(item.text)}")
        return 0
    compare(options.base, items)
    above = 0
    for subject, (limit, belongs) in LIMITS.items():
        reached = score([item for item in items if belongs(item)])
        above += reached > limit
        print(f"{subject}: {reached:.1f} hits per 1,000 words, limit {limit:g}")
    return int(bool(above) and not options.path)


if __name__ == "__main__":
    sys.exit(main())
