"""The sentences and numbers of pages and commands."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from fedbn_flwr.lab.results.intervals import Interval
from fedbn_flwr.lab.results.numbers import directed, shown, with_unit
from fedbn_flwr.lab.results.predictions import read_predictions
from fedbn_flwr.lab.results.ranking import Ranking
from fedbn_flwr.lab.results.sites import CLASSES, Comparison, mismatch
from fedbn_flwr.training.tasks import higher_is_better

WORDS = {1: "better", -1: "worse", 0: "not decided"}
"""The words for the sign of a difference, if higher values are better."""


def of_mean(found: Comparison, metric: str, seed: int, against: object = None) -> str:
    """Return the mean over the sites in a sentence, maybe with the difference."""
    sites = f"{len(found.sites)} site{'' if len(found.sites) == 1 else 's'}"
    text = f"Mean test {directed(metric)} of {sites}: {with_unit(found.mean.value, metric)}"
    about = f"{found.examples:,} test examples, seed {seed}"
    if not against:
        text += f" ({ends(found.mean, metric)}; {about})"
    elif found.gap.value is not None:
        text += (
            f" ({about}). {against} has {with_unit(found.other.value, metric)} at the same"
            f" sites; difference {shown(found.gap.value, metric, '+')}"
            f" ({ends(found.gap, metric, '+')}): {word(found.gap, metric)}"
        )
    without = ", ".join(f"{site} ({why})" for site, why in found.left_out.items())
    text = f"{text}. Without {without}." if without else f"{text}."
    odd = [str(row["site"]) for row in found.rows if "reversed" in row.get(CLASSES, ())]
    if odd:
        text += (
            f" The AUROC is below 50 %, beyond chance, at {', '.join(odd)}: look there"
            " for reversed labels, or columns in another order."
        )
    return text


def of_ranking(found: Ranking) -> Iterator[str]:
    """Yield the sentences on the methods of a study."""
    if found.at_sites:
        others = [name for name in found.means if name not in found.at_sites]
        yield (
            "No method is the best, because the tests differ: the mean over the sites"
            f" ({', '.join(found.at_sites)}), and all test examples together"
            f" ({', '.join(others)}). Set eval-on=personal-own for every method."
        )
        return
    metric, best = found.metric, found.means[found.best]
    examples = f", {found.examples:,} test examples each" if found.examples else ""
    seeds = f"seeds: {len(found.seeds)}{examples}"
    yield (
        f"{found.best} has the best {directed(metric)}, {with_unit(best.value, metric)} on"
        f" average ({seeds})."
    )
    for name, gap in found.gaps.items():
        decided = "established" if gap.side(found.pairs) else "not established"
        decided += " for this seed" if len(found.seeds) == 1 else ""
        if found.needed.get(name):
            decided += f"; about {found.needed[name]} seeds would decide it"
        yield (
            f"The difference from {name} is {shown(gap.value, metric, '+')}"
            f" ({ends(gap, metric, '+', found.pairs)}): {decided}."
        )


def of_mismatch(run: Path) -> str:
    """Return a sentence if the running statistics of a run do not fit, otherwise ""."""
    found = mismatch(read_predictions(run))
    if found is None:
        return ""
    batch, running = (
        with_unit(value, found.metric) for value in (found.batch, found.running)
    )
    return (
        f"The running statistics do not fit the weights at {', '.join(found.sites)}:"
        f" {found.metric} is {batch} with batch statistics, and {running} with running"
        f" statistics, which count ({found.examples:,} test examples)"
    )


def ends(number: Interval, metric: str, sign: str = "", of: int = 1) -> str:
    """Return the interval in words, or the reason why there is none.

    ``of`` numbers are compared.
    """
    low, high = number.ends(of)
    if low is None:
        return f"no interval: {number.why}"
    return f"95 % interval {shown(low, metric, sign)} to {shown(high, metric, sign)}"


def word(gap: Interval, metric: str, of: int = 1) -> str:
    """Return whether a difference is better, worse or not decided."""
    return WORDS[gap.side(of) * (1 if higher_is_better(metric) else -1)]


@functools.cache
def template(name: str) -> jinja2.Template:
    """Return a template of this folder, with the style. The templates have the words."""
    folder = Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["code"] = _code
    # The style is in the page, because a page is sent as one file.
    style = Markup((folder / "report.css").read_text(encoding="utf-8"))
    return environment.get_template(name, globals={"style": style})


def _code(text: object) -> Markup:
    """Return a text of a page, with code elements instead of backticks."""
    # ``re.sub`` of a Markup would escape the elements.
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))
