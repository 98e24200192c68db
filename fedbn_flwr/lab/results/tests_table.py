"""The table of all tests of a run, and the means in the lines of its rounds.

``tests.csv`` has a row for each round, site, part of the data, model, statistics and
metric. ``in_line`` makes the tests in the lines of ``metrics.jsonl`` from these rows. It
is the only function that computes a mean for a line.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.lab.results.files import TESTS_FILE, own_text, read_metrics, safe_cell
from fedbn_flwr.messages.protocol import NUM_EXAMPLES, VALIDATION
from fedbn_flwr.messages.site_names import texts_of
from fedbn_flwr.server.methods.params import RECALIBRATED, TEST_BN
from fedbn_flwr.server.methods.shared_bn import SHARED_BN
from fedbn_flwr.training.tasks import Score, quantity_of

if TYPE_CHECKING:
    import pandas as pd

HELD_OUT = "held-out"
"""The part of a site that never trains, and the key of its tests in a line."""
RUNNING = "running"
CLIENTS = "-clients"
"""The end of the key for the number of clients that define a metric."""
DOMAIN = "domain-"
"""The beginning of the part with the test examples of one domain."""

OWN_SCORE = "own-score"
"""Key of the facts of a user's score in a summary, see ``Score``."""
# the names of clients' tests, and the part of the data of each
_PARTS = {"own": "test", "global": "all", VALIDATION: VALIDATION}
# the statistics of held-out tests with another name in a line
_HELD_OUT_NAMES = {RUNNING: "global", SHARED_BN: "averaged"}
_WITH_BN = (SHARED_BN, RECALIBRATED, f"global{TEST_BN}", f"{SHARED_BN}{TEST_BN}")


class Measured(NamedTuple):
    """One row: the value of a metric in one test.

    Attributes:
        round: the round whose model was tested.
        client: the number of the site that trains, otherwise None.
        site: the name of the site, or "client N"; "" if the examples of all sites are
            tested together.
        part: "test", "validation" or "train"; "all" if a client tests the examples of
            all sites; "domain-NAME"; "held-out" for the test examples of a site that
            never trains.
        examples: the number of examples.
        model: "global", or "own" for the model that a client tests.
        bn: the BatchNorm statistics: "running", "averaged-bn", "recalibrated",
            "adapted", or a name that ends in "test-bn".
        metric: the name of the metric.
        value: its value; NaN if the examples do not define it, or the model diverged.
    """

    round: int
    client: int | None
    site: str
    part: str
    examples: int
    model: str
    bn: str
    metric: str
    value: float


def own_score(score: str) -> dict[str, Any]:
    """Return the facts of a user's score for a summary, or {}."""
    if not isinstance(score, Score):
        return {}
    return {OWN_SCORE: score.__getnewargs__()}


def metric_in(summary: Mapping[str, Any], *, prefix: bool = False) -> str:
    """Return the main metric in a summary, with the facts of a user's score.

    With ``prefix``, it is the key, such as "test-accuracy".
    """
    key, own = str(summary["headline"]), summary.get(OWN_SCORE)
    if not own:
        return key if prefix else quantity_of(key)
    return Score(key if prefix else own[0], *own[1:])


def key_of(test: Any) -> tuple[Any, ...]:
    """Return everything of a row but the number of examples and the value."""
    return test.round, test.site, test.part, test.model, test.bn, test.metric


def site_name(client: str | int, names: Mapping[str, str]) -> str:
    """Return the name of a client in all files, or "client N" without a name.

    ``names`` are the clients' names by number.
    """
    return texts_of(names).get(str(client), f"client {client}")


class GlobalTest(NamedTuple):
    """A test of the global model.

    Attributes:
        prefix: the beginning of its keys in a line.
        part: its part of the data, as in ``Measured``.
        bn: its BatchNorm statistics, as in ``Measured``.
    """

    prefix: str
    part: str
    bn: str


GLOBAL_TESTS = {
    "global": GlobalTest("test", "test", RUNNING),
    "global-train": GlobalTest("test-global-train", "train", RUNNING),
    **{name: GlobalTest(f"test-{name}", "test", name) for name in _WITH_BN},
}
"""The tests of the global model by their names in ``eval-on``."""
_PREFIXES = {(test.part, test.bn): test.prefix for test in GLOBAL_TESTS.values()}


def of_clients(
    server_round: int,
    evaluations: Mapping[str, Mapping[str, Any]],
    names: Mapping[str, str],
) -> Iterator[Measured]:
    """Yield the tests in the replies of clients, given by number of the client.

    ``names`` are the clients' names by number.
    """
    count = f"-{NUM_EXAMPLES}"
    for client, reply in evaluations.items():
        site = site_name(client, names)
        sets = [key.removesuffix(count) for key in reply if key.endswith(count)]
        for key, value in reply.items():
            # Take the longest name, because "domain-a" also begins "domain-a-b".
            fitting = [name for name in sets if key.startswith(f"{name}-")]
            name = max(fitting, key=len, default="")
            part = _PARTS.get(name, name if name.startswith(DOMAIN) else "")
            examples = int(reply.get(f"{name}{count}", 0))
            if part and examples > 0 and not key.endswith(count):
                metric = key.removeprefix(f"{name}-")
                place = (server_round, int(client), site, part, examples)
                yield Measured(*place, "own", RUNNING, metric, float(value))


def in_line(
    tests: Iterable[Measured],
    domain_of: Callable[[int], str | None] = lambda client: None,
    enough: Callable[[Measured], bool] = lambda test: True,
) -> dict[str, Any]:
    """Return the tests of a round by their keys in ``metrics.jsonl``.

    A test of all examples has a key such as ``test-accuracy``. Tests of clients have the
    plain mean over these clients (arXiv:2301.02982, 6.2.1). A site whose examples do not
    define the metric, or are too few, is left out; then ``NAME-clients`` is the number
    of sites in the mean. Held-out sites never train. They have their own mean, also of
    sites with few examples. The result of a domain has the key ``NAME/DOMAIN``.

    Args:
        tests: the rows of one round.
        domain_of: returns the domain of a client, or None.
        enough: returns whether the test of a client counts.
    """
    line: dict[str, Any] = {}
    sites: dict[str, list[Measured]] = {}
    rows = list(tests)
    losses = {key_of(test)[:-1]: test.value for test in rows if test.metric == "loss"}
    for test in rows:
        if test.part == HELD_OUT:
            name = f"{_HELD_OUT_NAMES.get(test.bn, test.bn)}-{test.metric}"
            sites.setdefault(f"{HELD_OUT}-{name}", []).append(test)
        elif test.client is not None:
            for name, part in _PARTS.items():
                if part == test.part:
                    key = f"personal-{name}-{test.metric}"
                    sites.setdefault(key, []).append(test)
            domain = domain_of(test.client) if test.part == "test" else None
            if domain and test.metric != "loss":
                key = f"personal-own-{test.metric}/{domain}"
                sites.setdefault(key, []).append(test)
        elif test.part.startswith(DOMAIN):
            domain = test.part.removeprefix(DOMAIN)
            line[f"{_PREFIXES['test', test.bn]}-{test.metric}/{domain}"] = test.value
        else:
            prefix = _PREFIXES.get((test.part, test.bn), VALIDATION)
            line[f"{prefix}-{test.metric}"] = test.value
    held_out = len({test.site for test in rows if test.part == HELD_OUT})
    for key, of_sites in sites.items():
        # A held-out site may lack a test, for example with too few training inputs.
        asked = held_out if key.startswith(HELD_OUT) else len(of_sites)
        means = _means(key, of_sites, losses, asked, enough)
        line |= {key: means[key]} if "/" in key else means
    return line


def _means(
    key: str,
    tests: Sequence[Measured],
    losses: Mapping[tuple[Any, ...], float],
    asked: int,
    enough: Callable[[Measured], bool],
) -> dict[str, float]:
    """Return the means of the tests of ``asked`` sites."""
    # A NaN with a finite loss is an undefined metric, and it is left out. A NaN with a
    # non-finite loss shows divergence, and it counts.
    kept = [
        test
        for test in tests
        if (
            not math.isnan(test.value)
            or not math.isfinite(losses.get(key_of(test)[:-1], 0.0))
        )
        and enough(test)
    ]
    means: dict[str, float] = {}
    if len(kept) < asked:
        means[key + CLIENTS] = len(kept)
    if not kept:
        return {**means, key: math.nan}
    return {**means, key: sum(test.value for test in kept) / len(kept)}


def as_text(tests: Iterable[Measured], *, header: bool = False) -> str:
    """Return rows of ``tests.csv``."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([Measured._fields] * header)
    writer.writerows([safe_cell(cell) for cell in test] for test in tests)
    return text.getvalue()


def cut_back(run: Path, after: int) -> None:
    """Remove the tests of rounds later than ``after``, and an incomplete last row."""
    head, *rows = _rows(run) or [as_text([], header=True)]
    kept = [row for row in rows if int(row.partition(",")[0]) <= after]
    write_atomically(run / TESTS_FILE, "".join([head, *kept]))


def _rows(run: Path) -> list[str]:
    """Return the complete lines of ``tests.csv``, the head first."""
    path = run / TESTS_FILE
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]


def read_tests(run: Path) -> pd.DataFrame:
    """Return the tests of the finished rounds of a run.

    The columns are the attributes of ``Measured``.
    """
    # Import here, because a refused run needs no pandas.
    import pandas as pd

    rows = _rows(run) or [as_text([], header=True)]
    # The name of a site is a text, even if it is "NA" or "007".
    table = pd.read_csv(
        io.StringIO("".join(rows)),
        dtype={"site": str, "client": "Int64", "value": str},
        na_values={"client": [""]},
        keep_default_na=False,
    )
    table["site"] = table["site"].map(own_text)
    # Python reads a float without loss.
    table["value"] = table["value"].astype(float)
    return table[table["round"] <= len(read_metrics(run / "metrics.jsonl"))]


def site_names_of(run: Path) -> dict[str, str]:
    """Return the name of each tested client of a run by its number, if it has one."""
    tests = read_tests(run)
    tests = tests[tests["client"].notna()]
    names = dict(zip(tests["client"].astype(str), tests["site"], strict=True))
    return {
        client: name for client, name in names.items() if name != f"client {client}"
    }
