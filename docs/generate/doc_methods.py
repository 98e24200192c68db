"""The page of each method, made from its module's docstring, its ``Params``, its recipe
and the recorded results; and the options and combinations of all methods.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from doc_travels import cost_of, travels_section

from fedbn_flwr.batchnorm import adaptation
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.norms import feature
from fedbn_flwr.server.methods import momentum, shared_bn
from fedbn_flwr.server.methods.params import Params, extras_of
from fedbn_flwr.server.rounds import recalibration
from fedbn_flwr.strategies import METHODS, STRATEGIES, Strategy, combined

__all__ = [
    "method_pages",
    "method_title",
    "options",
    "page_of",
    "reached_with_worst",
]

_OPTIONS = {
    feature: "feature-norm",
    momentum: "momentum-scope",
    recalibration: "recalibrate",
    shared_bn: "eval-on=averaged-bn",
    adaptation: "test-bn",
}
_COMBINATIONS_HEAD = """
## Methods in one run

A method changes what stays with the clients, their local training, or the server's step. In Python, `combined` joins
methods, in any order. Each pair must be in this list, which has a pair only once.

```python
from fedbn_flwr.strategies import MTFL, FedAdam, combined

strategy = combined(MTFL, FedAdam)(eta=0.03)
```
"""
_REACHED = re.compile(
    r"# (Digits, .+)\. Reaches (\d+\.\d\d) % on (.+) \((seed \d+), CPU"
)
_RESULTS = {"papers.md": "the papers' tables", "which-method.md": "seven methods"}
_UP = "../../"  # from docs/methods to the root of the checkout
_SECTIONS = (
    *("## When\n\nUse when: ", "\n\nNot when: ", "## Problem\n", "## Algorithm\n"),
    *("## Differs from the paper\n", "## Law\n"),
)
"""What the docstring of a method's module must have, in this order."""
StrategyClass = type[Strategy]


def method_pages(root: Path) -> dict[Path, str]:
    """Return the text of ``docs/methods/NAME.md`` for every method, by path.

    Args:
        root: the checkout, which has the recipes and ``docs/results/methods.yaml``.
    """
    results = yaml.safe_load(
        (root / "docs/results/methods.yaml").read_text(encoding="utf-8")
    )
    folder = Path("docs/methods")
    pages = {}
    for name, method in STRATEGIES.items():
        if page_of(name) == f"{name}.md":
            pages[folder / page_of(name)] = _page(method, root, results)
    return pages


def page_of(name: str) -> str:
    """Return the file of a method's page: the methods of one module share the page of
    the first.
    """
    module = STRATEGIES[name].__module__
    return next(
        f"{first}.md"
        for first, other in STRATEGIES.items()
        if other.__module__ == module
    )


def reached_with_worst(row: Mapping[str, Any]) -> str:
    """Return the result of a row of methods.yaml, with the lowest mean of a site."""
    worst = f", worst site {row['worst']}" if "worst" in row else ""
    return f"{row['here']}{worst}"


def method_title(method: StrategyClass) -> str:
    """Return the paper's name of a method, with which its docstring begins, or the
    classes of a module of several.
    """
    same = [
        other.__name__
        for other in STRATEGIES.values()
        if other.__module__ == method.__module__
    ]
    if len(same) > 1:
        return ", ".join(same)
    return _docstring(sys.modules[method.__module__])[0].partition(":")[0]


def _page(method: StrategyClass, root: Path, results: Mapping[str, Any]) -> str:
    file = method.__module__.replace(".", "/") + ".py"
    _refuse_incomplete(method, file, root)
    first, body = _docstring(sys.modules[method.__module__])
    made = travels_section(METHODS[method.name](method.Params()))
    head, when, body = _with_when(body)
    before, mark, after = body.partition("## Differs from the paper")
    lead = first.partition(": ")[2]
    return "\n".join(
        [
            f"<!-- Made by `make generate` from {file}. Do not edit. -->",
            "",
            f"# {method_title(method)}",
            "",
            f"{lead[0].upper()}{lead[1:]}",
            "",
            *_box(method, when, results),
            "",
            head,
            "",
            before.strip(),
            "",
            *made,
            "",
            mark + after,
            "",
            *_settings(method),
            "## What it reached",
            "",
            *_reached(method, root, results),
            "",
        ]
    )


def _refuse_incomplete(method: StrategyClass, file: str, root: Path) -> None:
    """Raise ValueError if a method lacks what its page is made from."""
    text = inspect.cleandoc(sys.modules[method.__module__].__doc__ or "")
    at = 0
    for section in _SECTIONS:
        at = text.find(section, at)
        if at < 0:
            raise ValueError(
                f"{file}: the docstring has no {section.strip()!r}, or not in the order"
                " of CONTRIBUTING.md"
            )
    if not (root / _recipe(method.name)).exists():
        raise ValueError(
            f"{file}: the method has no {_recipe(method.name)}, a config that runs in"
            " seconds"
        )


def _with_when(body: str) -> tuple[str, list[str], str]:
    """Return what stands before the section "When", its two paragraphs, and the rest."""
    head, _, rest = body.partition("## When\n")
    when, mark, rest = rest.partition("## Problem")
    return (
        head.strip(),
        [" ".join(text.split()) for text in when.strip().split("\n\n")],
        mark + rest,
    )


def _box(
    method: StrategyClass, when: list[str], results: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the box at the head of a page: when, what was measured, cost, command."""
    yield '!!! abstract "In short"'
    use, against = when
    lines = [
        use.replace("Use when:", "**Use when:**"),
        against.replace("Not when:", "**Not when:**"),
    ]
    if measured := _measured(method, results):
        lines.append(f"**Measured:** {measured}")
    cost = cost_of(METHODS[method.name](method.Params()))
    lines.append(f"**[Cost](index.md#symbols):** {cost}")
    lines.append(
        f"**Command:** `fedbn-flwr run {_recipe(method.name)}"
        f" --out runs/methods/{method.name}`"
    )
    paper = re.search(r"arXiv:(\d{4}\.\d{5})", METHODS[method.name].source)
    links = [f"[arXiv:{paper[1]}](https://arxiv.org/abs/{paper[1]})"] if paper else []
    code = f"{method.__module__.replace('.', '/')}.py"
    links += [
        f"[code]({_UP}{code})",
        f"[recipe]({_UP}{_recipe(method.name)})",
        "[your app](../flower-projects.md)",
    ]
    lines.append(f"**Read:** {', '.join(links)}")
    for line in lines:
        yield ""
        yield f"    {line}"


def _measured(method: StrategyClass, results: Mapping[str, Any]) -> str:
    """Return a result of the method beside FedAvg's with BatchNorm in the same study;
    "" without one.
    """
    if method.name == "fedavg":
        return ""
    order = list(results["studies"]).index
    fedavg = {}
    for row in results["methods"]["fedavg"]:
        if "here" in row:
            case = row.get("case", "BN").removeprefix("BN, ")
            fedavg[row["study"], case] = reached_with_worst(row)
    rows = results["methods"].get(method.name, ())
    for row in sorted(
        rows, key=lambda row: (not row.get("first"), order(row["study"]))
    ):
        case = row.get("case", "BN")
        reference = fedavg.get((row["study"], case), fedavg.get((row["study"], "BN")))
        if reference is not None and "here" in row:
            return (
                f"{reached_with_worst(row)}; FedAvg with BatchNorm {reference}"
                f" ({_setting(row, results)})."
            )
    return ""


def _setting(row: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    return ", ".join([_link(results["studies"][row["study"]]), *_details(row)])


def _link(study: Mapping[str, Any]) -> str:
    return f"[{study['name']}](../results/{study['page']})"


def _details(row: Mapping[str, Any]) -> list[str]:
    return [str(row[key]) for key in ("case", "note") if key in row]


def _docstring(module: Any) -> tuple[str, str]:
    """Return the summary and the rest; code quotes are Markdown's."""
    first, _, body = inspect.cleandoc(module.__doc__).partition("\n\n")
    return first.replace("\n", " "), body.replace("``", "`").strip()


def _settings(method: StrategyClass) -> Iterator[str]:
    common = {name: field.default for name, field in Params.model_fields.items()}
    own = []
    for name, field in method.Params.model_fields.items():
        if name not in common or field.default != common[name]:
            default = (
                str(field.default).lower()
                if isinstance(field.default, bool)
                else repr(field.default)
            )
            # Show both defaults if they differ, because Flower's class of the same name
            # has another default than our configs.
            in_config = extras_of(field).get("in_config", field.default)
            if in_config != field.default:
                default += f"; in a config: {in_config!r}"
            own.append(f"`{name}` ({default})")
    if own:
        yield f"## Settings\n\n[Config keys](../config.md): {', '.join(own)}.\n"


def _recipe(name: str) -> str:
    return f"apps/main/recipes/{name}.yaml"


def _reached(
    method: StrategyClass, root: Path, results: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the recipe's result, own results beside a paper's, and links to others."""
    same = [
        other for other in STRATEGIES.values() if other.__module__ == method.__module__
    ]
    table = ["", "| setting | here, % | paper, % |", "|---|---|---|"]
    elsewhere: dict[str, dict[str, None]] = {}
    for other in same:
        of = f"{other.__name__}: " if len(same) > 1 else ""
        found = _REACHED.search((root / _recipe(other.name)).read_text("utf-8"))
        if found:
            recipe = f"the recipe of {other.__name__}" if of else "its recipe"
            yield f"On digits, {recipe} reaches {found[2]} % on {found[3]}."
        order = list(results["studies"]).index
        rows = results["methods"].get(other.name, ())
        for row in sorted(rows, key=lambda row: order(row["study"])):
            study = results["studies"][row["study"]]
            if "here" not in row:
                continue
            link = _link(study)
            if "paper" in row:
                text = ", ".join([link, *_details(row)])
                here = reached_with_worst(row)
                table.append(f"| {of}{text} | {here} | {row['paper']} |")
            else:
                file = study["page"].partition("#")[0]
                elsewhere.setdefault(file, {})[link] = None
    if len(table) > 3:
        yield from table
    if elsewhere:
        yield ""
        links_or_pages = [
            f"[{_RESULTS[file]}](../results/{file})"
            if len(links) > 1
            else next(iter(links))
            for file, links in elsewhere.items()
        ]
        yield f"More results: {', '.join(links_or_pages)}."


def _combinations() -> str:
    roles = ("local-part", "client-hooks", "server-step")
    named = [
        (name, method)
        for role in roles
        for name, method in STRATEGIES.items()
        if METHODS[name].role == role
    ]
    optimizers = ", ".join(
        f"`{name}`" for name, _ in named if METHODS[name].role == "server-step"
    )
    rows: dict[str, list[str]] = {}
    for at, (name, method) in enumerate(named):
        later = [
            f"`{other}`" for other, one in named[at + 1 :] if _combine(method, one)
        ]
        if others := ", ".join(later).replace(optimizers, "every server optimizer"):
            rows.setdefault(others, []).append(f"`{name}`")
    lines = [_COMBINATIONS_HEAD]
    lines += [f"- {', '.join(names)}: {others}" for others, names in rows.items()]
    lines += ["", f"The server optimizers are {optimizers}. Others are used alone:", ""]
    lines += [f"- {method.alone}." for method in METHODS.values() if method.alone]
    return "\n".join([*lines, ""])


def _combine(one: StrategyClass, other: StrategyClass) -> bool:
    try:
        combined(one, other)
    except ConfigError:
        return False
    return True


def options() -> str:
    """Return the sections of the options that any method may use, and of the methods in
    one run: lead and cautions, with a link to algorithm and laws.
    """
    lines = [
        "Most methods accept the options below; the others refuse them, with the reason. The"
        " linked files have algorithms and laws.",
        "",
    ]
    for module, key in _OPTIONS.items():
        first, body = _docstring(module)
        title, _, lead = first.partition(": ")
        file = module.__name__.replace(".", "/") + ".py"
        about = body.partition("## ")[0]
        lines += [
            f"## {title}",
            "",
            f"{lead[0].upper()}{lead[1:]} Config: `{key}`. Code: [{file}](../{file}).",
            "",
            # Its cautions are in bold.
            *(f"{text}\n" for text in about.split("\n\n") if text.startswith("**")),
        ]
        # They are a request of their own to the clients, and reveal more.
        about_classes = [
            one
            for one in re.split(r"^#+ ", body, flags=re.MULTILINE)
            if one.startswith("Class ")
        ]
        lines += [f"### {text.strip()}\n" for text in about_classes]
    return "\n".join(lines) + _combinations()
