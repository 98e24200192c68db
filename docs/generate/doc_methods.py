"""The page of each method, made from its module's docstring, its ``Params``, its recipe and the recorded results."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from doc_config import field_cells
from doc_travels import cost_of, travels_section

from fedbn_flwr.batchnorm import adaptation
from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.norms import feature
from fedbn_flwr.server import momentum, reestimation, shared_bn
from fedbn_flwr.server.params import Params
from fedbn_flwr.strategies import METHODS, STRATEGIES, Strategy, combined

__all__ = ["method_pages", "method_title"]

_OPTIONS = {
    feature: "feature-norm",
    momentum: "momentum-scope",
    reestimation: "recalibrate",
    shared_bn: "eval-on=averaged-bn",
    adaptation: "test-bn",
}
_OPTIONS_HEAD = """# Options of every method

These parts are not methods. Any method may use them; a method that cannot refuses them with a message that says why.
"""
_COMBINATIONS_HEAD = """<!-- Made by `make generate` from fedbn_flwr/strategies. Do not edit. -->

# Methods in one run

A method changes one of three places of FedAvg, and a run may have a method in each place: what stays with the clients
(`local-part`), the local training (`client-hooks`, one or several) and the server's step (`server-step`). The method in
`strategy` is one of them; the three keys add others. MTFL's own paper combines its local part with Adam on the server:

```sh
fedbn-flwr run --set strategy=mtfl --set server-step=fedadam --set num-server-rounds=5 --out runs/mtfl-fedadam
```

FixBN with FedProx's term in every local step, in Python and from the command line:

```python
from fedbn_flwr.strategies import FedProx, FixBN, combined

strategy = combined(FixBN, FedProx)(freeze_at=0.5, proximal_mu=0.01)
```

```sh
fedbn-flwr run --set strategy=fixbn --set client-hooks=fedprox --set num-server-rounds=4 --out runs/fixbn-fedprox
```

The order has no meaning. The settings are those of all methods in the run. Adaptive gradient clipping (`agc`) and
momentum across rounds (`momentum-scope`) are settings of every method.

Each pair marked "yes" equals a slow reference in plain torch, in float64
(`tests/strategies/test_combinations.py`). Every other pair is refused before the run, with the reason below. Three and
more methods are combined if each pair is.
"""
_REACHED = re.compile(r"# (Digits, .+)\. Reaches (\d+\.\d\d) % on (.+) \((seed \d+), CPU")
_UP = "../../"  # from docs/methods to the root
StrategyClass = type[Strategy]


def method_pages(root: Path) -> dict[Path, str]:
    """Return the text of ``docs/methods/NAME.md`` for every method, of the options and the combinations, by path.

    Args:
        root: the checkout, which has the recipes and ``docs/results/methods.yaml``.
    """
    results = yaml.safe_load((root / "docs/results/methods.yaml").read_text(encoding="utf-8"))
    folder = Path("docs/methods")
    pages = {folder / f"{name}.md": _page(method, root, results) for name, method in STRATEGIES.items()}
    return pages | {folder / "options.md": _options_page(root), folder / "combinations.md": _combinations_page()}


def method_title(method: StrategyClass) -> str:
    """Return the paper's name of a method: how its module's docstring begins, or the class, if a module has several."""
    several = sum(other.__module__ == method.__module__ for other in STRATEGIES.values()) > 1
    return method.__name__ if several else _docstring(sys.modules[method.__module__])[0].partition(":")[0]


def _page(method: StrategyClass, root: Path, results: Mapping[str, Any]) -> str:
    file = method.__module__.replace(".", "/") + ".py"
    first, body = _docstring(sys.modules[method.__module__])
    made = travels_section(METHODS[method.name](method.Params()))
    head, when, body = _with_when(body)
    before, mark, after = body.partition("## Differs from the paper")
    lead = first.partition(": ")[2]
    kept = ", ".join(part.value for part in Part if part in method().local) or "nothing"
    return "\n".join(
        [
            f"<!-- Made by `make generate` from {file}. Do not edit. -->",
            "",
            f"# {method_title(method)}",
            "",
            f"{lead[0].upper()}{lead[1:]}",
            "",
            "| name | class | model entries that stay with the client | file |",
            "|---|---|---|---|",
            f"| `{method.name}` | `{method.__name__}` | {kept} | [{file}]({_UP}{file}) |",
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
            "## Settings",
            "",
            *_settings(method),
            "",
            "## How to run it",
            "",
            *_how_to_run(method),
            "",
            "## What it reached",
            "",
            *_reached(method, root, results),
            "",
        ]
    )


def _with_when(body: str) -> tuple[str, list[str], str]:
    """Return what stands before the section "When", its two paragraphs, and the rest."""
    head, _, rest = body.partition("## When\n")
    when, mark, rest = rest.partition("## Problem")
    return head.strip(), [" ".join(text.split()) for text in when.strip().split("\n\n")], mark + rest


def _box(method: StrategyClass, when: list[str], results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the box at the head of a page: when, what was measured, cost, command."""
    yield '!!! abstract "In short"'
    use, against = when
    lines = [use.replace("Use when:", "**Use when:**"), against.replace("Not when:", "**Not when:**")]
    if measured := _measured(method, results):
        lines.append(f"**Measured:** {measured}")
    lines.append(f"**Cost:** {cost_of(METHODS[method.name](method.Params()))}")
    lines.append(f"**Command:** `fedbn-flwr run {_recipe(method.name)} --out runs/{method.name}`")
    paper = re.search(r"arXiv:(\d{4}\.\d{5})", METHODS[method.name].source)
    links = [f"[arXiv:{paper[1]}](https://arxiv.org/abs/{paper[1]})"] if paper else []
    code = f"{method.__module__.replace('.', '/')}.py"
    links += [
        f"[code]({_UP}{code})",
        f"[recipe]({_UP}{_recipe(method.name)})",
        "[diff for your app](../flower-projects.md)",
    ]
    lines.append(f"**Read:** {', '.join(links)}")
    for line in lines:
        yield ""
        yield f"    {line}"


def _measured(method: StrategyClass, results: Mapping[str, Any]) -> str:
    """Return a result of the method beside FedAvg's with BatchNorm in the same study; "" without one."""
    if method.name == "fedavg":
        return ""
    order = list(results["studies"]).index
    fedavg = {}
    for row in results["methods"]["fedavg"]:
        if "here" in row:
            fedavg[row["study"], row.get("case", "BN").removeprefix("BN, ")] = row["here"]
    rows = results["methods"].get(method.name, ())
    for row in sorted(rows, key=lambda row: (not row.get("first"), order(row["study"]))):
        case = row.get("case", "BN")
        reference = fedavg.get((row["study"], case), fedavg.get((row["study"], "BN")))
        if reference is not None and "here" in row:
            return f"{row['here']} where FedAvg with BatchNorm has {reference} ({_setting(row, results)})."
    return ""


def _setting(row: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    title = results["studies"][row["study"]]["title"]
    return ", ".join([title, *(str(row[key]) for key in ("case", "note") if key in row)])


def _docstring(module: Any) -> tuple[str, str]:
    """Return the first line and the rest; code quotes are Markdown's."""
    first, _, body = inspect.cleandoc(module.__doc__).partition("\n")
    return first, body.replace("``", "`").strip()


def _settings(method: StrategyClass) -> Iterator[str]:
    common = {name: field.default for name, field in Params.model_fields.items()}
    fields = method.Params.model_fields
    own = {name: f for name, f in fields.items() if name not in common or f.default != common[name]}
    if own:
        yield "| argument | config key | type | default | allowed | meaning |"
        yield "|---|---|---|---|---|---|"
    for name, field in own.items():
        key = name.replace("_", "-")
        yield "| " + " | ".join([f"`{name}`", f"`{key}`", *field_cells(key, field)]) + " |"
    shared = ", ".join(f"`{name.replace('_', '-')}`" for name in common if name not in own)
    yield ""
    yield "These are the method's own." if own else "The method has no settings of its own."
    yield f"Every method reads {shared}, and refuses one that has no meaning for it: [config keys](../config.md)"
    yield "explains them."


def _recipe(name: str) -> str:
    return f"apps/main/recipes/{name}.yaml"


def _run_recipe(name: str) -> Iterator[str]:
    recipe = _recipe(name)
    yield f"The recipe [{recipe}]({_UP}{recipe}) runs on embedded data, in seconds:"
    yield ""
    yield "```sh no-run: tests/apps/test_recipes.py runs every recipe"
    yield f"fedbn-flwr run {recipe} --out runs/{name}"
    yield "```"
    yield ""


def _how_to_run(method: StrategyClass) -> Iterator[str]:
    yield from _run_recipe(method.name)
    yield "In a Flower `ServerApp` it takes Flower's arguments and the settings above; `arrays` is the initial model:"
    yield ""
    yield "```python no-run: needs the grid and the arrays of a ServerApp"
    yield f"from fedbn_flwr.strategies import {method.__name__}"
    yield ""
    yield f"strategy = {method.__name__}()"
    yield "result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=20)"
    yield "```"
    yield ""
    yield "[Flower projects](../flower-projects.md) shows what the client adds."


def _reached(method: StrategyClass, root: Path, results: Mapping[str, Any]) -> Iterator[str]:
    yield "Test accuracy in per cent. [The papers' tables](../results/papers.md) say what differs from the papers."
    yield ""
    yield "| setting | here | paper | how |"
    yield "|---|---|---|---|"
    found = _REACHED.search((root / _recipe(method.name)).read_text(encoding="utf-8"))
    if found:
        yield f"| {found[1]}, on {found[3]} | {found[2]} | - | its recipe, {found[4]} |"
    order = list(results["studies"]).index
    for row in sorted(results["methods"].get(method.name, ()), key=lambda row: order(row["study"])):
        study = results["studies"][row["study"]]
        how = f"[{study['name']}](../results/{study['page']}), {study['how']}" if "how" in study else "-"
        yield f"| {_setting(row, results)} | {row.get('here', 'not run')} | {row.get('paper', '-')} | {how} |"


def _combinations_page() -> str:
    roles = ("local-part", "client-hooks", "server-step")
    named = [(name, method) for role in roles for name, method in STRATEGIES.items() if METHODS[name].role == role]
    lines = [_COMBINATIONS_HEAD, "| | " + " | ".join(f"`{name}`" for name, _ in named) + " |"]
    lines.append("|---" * (1 + len(named)) + "|")
    reasons: dict[str, int] = {}
    for name, method in named:
        cells = []
        for _, other in named:
            try:
                cells.append("-" if other is method else ("yes" if combined(method, other) else ""))
            except ConfigError as error:
                why = str(error).partition("cannot be combined: ")[2]
                cells.append(str(reasons.setdefault(why, len(reasons) + 1)))
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    lines += ["", *(f"{number}. {why}." for why, number in reasons.items()), ""]
    lines += ["Methods that are not combined with others:", ""]
    lines += [f"- `{method.name}`: {method.alone}." for method in METHODS.values() if method.alone]
    return "\n".join([*lines, ""])


def _options_page(root: Path) -> str:
    lines = [f"<!-- Made by `make generate` from the modules. Do not edit. -->\n\n{_OPTIONS_HEAD}"]
    for module, key in _OPTIONS.items():
        first, body = _docstring(module)
        title, _, lead = first.partition(": ")
        lines += [f"## {title}", "", f"{lead[0].upper()}{lead[1:]} Config: `{key}`.", ""]
        lines += [re.sub(r"^## ", "### ", body, flags=re.MULTILINE), ""]
        if (root / _recipe(key)).is_file():
            lines += ["### How to run it", "", *_run_recipe(key)]
    return "\n".join(lines)
