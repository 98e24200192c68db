"""The constructors of the strategies, for editors and type checkers."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedbn_flwr.server.strategy import AggregateMetrics, Strategy
from fedbn_flwr.strategies import STRATEGIES

__all__ = ["STUB", "constructors"]

STUB = Path("fedbn_flwr/strategies/constructors.pyi")
_HEAD = """# Made by `make generate` from the settings of the methods. Do not edit.

from collections.abc import Sequence
from typing import Literal

from fedbn_flwr.batchnorm.parts import Parts
from fedbn_flwr.server.methods.together import Methods
from fedbn_flwr.server.runs.run_state import OnReplies, OnRoundEnd
from fedbn_flwr.server.strategy import AggregateMetrics
"""


def constructors() -> str:
    """Return the text of ``constructors.pyi``: each strategy with its arguments."""
    kinds = sorted(
        STRATEGIES.values(), key=lambda kind: (kind.__module__, kind.__name__)
    )
    imports = []
    for kind in kinds:
        name = kind.__name__
        imports.append(f"from {kind.__module__} import {name} as _{name}\n")
    return _HEAD + "".join(imports) + "".join(map(_class, kinds))


def _class(kind: type[Strategy]) -> str:
    # An editor shows the docstring of the class that it reads.
    docstring = textwrap.indent(f'"""{inspect.getdoc(kind)}\n"""', "    ")
    lines = [f"\nclass {kind.__name__}(_{kind.__name__}):", docstring, ""]
    lines.append("    def __init__(")
    lines += [f"        {argument}," for argument in _arguments(kind)]
    return "\n".join([*lines, "    ) -> None: ...\n"])


def _arguments(kind: type[Strategy]) -> Iterator[str]:
    yield "self"
    named = False
    for one in inspect.signature(kind).parameters.values():
        if one.kind is one.KEYWORD_ONLY and not named:
            named = True
            yield "*"
        default = repr(one.default).replace("'", '"')
        yield f"{one.name}: {_type(one.annotation)} = {default}"


def _type(annotation: Any) -> str:
    """Return an annotation as source code."""
    if annotation == AggregateMetrics | None:
        return "AggregateMetrics | None"
    text = str(annotation)
    if not isinstance(annotation, str):
        text = inspect.formatannotation(annotation)
    return text.replace("collections.abc.", "").replace("'", '"')
