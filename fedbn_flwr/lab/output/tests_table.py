"""The table of all tests of a run, and the means in the lines of its rounds.

``tests.csv`` has a row for each round, site, part of the data, model, statistics and
metric. ``in_line`` makes the tests in the lines of ``metrics.jsonl`` from these rows. It
is the only function that computes a mean for a line.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedbn_flwr.lab.files import TESTS_FILE, read_metrics
from fedbn_flwr.messages.protocol import NUM_EXAMPLES, VALIDATION
from fedbn_flwr.server.methods.params import RECALIBRATED, TEST_BN
from fedbn_flwr.server.methods.shared_bn import SHARED_BN
from fedbn_flwr.training.tasks import METRICS

if TYPE_CHECKING:
    import pandas as pd

HELD_OUT = "held-out"
"""The part of a site that never trains, and the key of its tests in a line."""
RUNNING = "running"
CLIENTS = "-clients"
"""The end of the key for the number of clients that define a metric."""
DOMAIN = "domain-"
"""The beginning of the part with the test examples of one domain."""

_MEASURED = tuple(dict.fromkeys(("accuracy", "loss", *METRICS)))
# the names of clients' tests, and the part of the data of each
_PARTS = {"own": "test", "global": "all", VALIDATION: VALIDATION}
# the statistics of held-out tests with another name in a line
_HELD_OUT_NAMES = {RUNNING: "global", SHARED_BN: "averaged"}
_WITH_BN = (SHARED_BN, RECALIBRATED, f"global{TEST_BN}", f"{SHARED_BN}{TEST_BN}")


class Measured(NamedTuple):
    """One row: the value of a metric in one test.

    Attributes:
        round: the round whose model was tested.
        site: the client's number, the name of a held-out site, or "" if the examples of
            all sites are tested together.
        part: "test", "validation" or "train"; "all" if a client tests the examples of
            all sites; "domain-NAME"; "held-out" for the test examples of a site that
            never trains.
        examples: the number of examples; 0 if an older run did not record it.
        model: "global", or "own" for the model that a client tests.
        bn: the BatchNorm statistics: "running", "batch", "averaged-bn", "recalibrated",
            "adapted", "calibrated", or a name that ends in "test-bn".
        metric: the name of the metric.
        value: its value; NaN if the examples do not define it, or the model diverged.
    """

    round: int
    site: str
    part: str
    examples: int
    model: str
    bn: str
    metric: str
    value: float

    @property
    def key(self) -> tuple[Any, ...]:
        """Everything but the number of examples and the value."""
        return (*self[:3], *self[4:7])


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
    "global-batch-statistics": GlobalTest("test-batch", "test", "batch"),
    "global-train": GlobalTest("test-global-train", "train", RUNNING),
    **{name: GlobalTest(f"test-{name}", "test", name) for name in _WITH_BN},
}
"""The tests of the global model by their names in ``eval-on``."""
_PREFIXES = {(test.part, test.bn): test.prefix for test in GLOBAL_TESTS.values()}


def of_clients(
    server_round: int, evaluations: Mapping[str, Mapping[str, Any]]
) -> Iterator[Measured]:
    """Yield the tests in the replies of clients, given by number of the client."""
    count = f"-{NUM_EXAMPLES}"
    for client, reply in evaluations.items():
        for key, examples in reply.items():
            name = key.removesuffix(count)
            part = _PARTS.get(name, name if name.startswith(DOMAIN) else "")
            if name == key or not part or examples <= 0:
                continue
            for metric in _MEASURED:
                value = reply.get(f"{name}-{metric}")
                if value is not None:
                    about = (server_round, client, part, int(examples), "own", RUNNING)
                    yield Measured(*about, metric, float(value))


def in_line(
    tests: Iterable[Measured],
    domain_of: Callable[[int], str | None] = lambda client: None,
) -> dict[str, Any]:
    """Return the tests of a round by their keys in ``metrics.jsonl``.

    A test of all examples has a key such as ``test-accuracy``. Tests of clients have two
    means over these clients: ``NAME`` is the plain mean (arXiv:2301.02982, 6.2.1), and
    ``NAME-weighted`` is the mean weighted by the clients' examples. A site whose examples
    do not define the metric is left out; then ``NAME-clients`` is the number of sites in
    the mean. Held-out sites never train, so they have a mean of their own.

    Args:
        tests: the rows of one round.
        domain_of: returns the domain of a client, or None.
    """
    line: dict[str, Any] = {}
    held_out: dict[str, dict[str, Any]] = {}
    domains: dict[str, dict[str, Any]] = {}
    sites: dict[str, list[Measured]] = {}
    of_domains: dict[tuple[str, str], list[Measured]] = {}
    rows = list(tests)
    losses = {test.key[:-1]: test.value for test in rows if test.metric == "loss"}
    for test in rows:
        if test.part == HELD_OUT:
            name = f"{_HELD_OUT_NAMES.get(test.bn, test.bn)}-{test.metric}"
            of_site = held_out.setdefault(test.site, {NUM_EXAMPLES: test.examples})
            of_site[name] = test.value
            sites.setdefault(f"{HELD_OUT}-{name}", []).append(test)
        elif test.site:
            for name, part in _PARTS.items():
                if part == test.part:
                    key = f"personal-{name}-{test.metric}"
                    sites.setdefault(key, []).append(test)
            domain = domain_of(int(test.site)) if test.part == "test" else None
            if domain and test.metric != "loss":
                key = f"personal-own-{test.metric}"
                of_domains.setdefault((key, domain), []).append(test)
        elif test.part.startswith(DOMAIN):
            key = f"{_PREFIXES['test', test.bn]}-{test.metric}"
            domain = test.part.removeprefix(DOMAIN)
            domains.setdefault(key, {})[domain] = test.value
        else:
            prefix = _PREFIXES.get((test.part, test.bn), VALIDATION)
            line[f"{prefix}-{test.metric}"] = test.value
    if held_out:
        line[HELD_OUT] = held_out
    for key, of_sites in sites.items():
        # A held-out site may lack a test, for example with too few training inputs.
        asked = len(held_out) if key.startswith(HELD_OUT) else len(of_sites)
        line |= _means(key, of_sites, losses, asked)
    for (key, domain), of_sites in of_domains.items():
        means = _means(key, of_sites, losses, len(of_sites))
        domains.setdefault(key, {})[domain] = means[key]
    if domains:
        line["domains"] = domains
    return line


def _means(
    key: str,
    tests: Sequence[Measured],
    losses: Mapping[tuple[Any, ...], float],
    asked: int,
) -> dict[str, float]:
    """Return the means of the tests of ``asked`` sites."""
    # A NaN with a finite loss is an undefined metric, and it is left out. A NaN with a
    # non-finite loss shows divergence, and it counts.
    kept = [
        test
        for test in tests
        if not math.isnan(test.value)
        or not math.isfinite(losses.get(test.key[:-1], 0.0))
    ]
    means: dict[str, float] = {}
    if len(kept) < asked:
        means[key + CLIENTS] = len(kept)
    if not kept:
        return {**means, key: math.nan}
    means[key] = sum(test.value for test in kept) / len(kept)
    if not key.startswith(HELD_OUT):
        total = sum(test.value * test.examples for test in kept)
        means[f"{key}-weighted"] = total / sum(test.examples for test in kept)
    return means


def as_text(tests: Iterable[Measured], *, header: bool = False) -> str:
    """Return rows of ``tests.csv``."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([Measured._fields] * header)
    writer.writerows(tests)
    return text.getvalue()


def stored_tests(run: Path) -> list[Measured]:
    """Return the complete rows of ``tests.csv`` in a run's folder.

    If the file is absent, an earlier version made the run. Then the tests are read from
    the lines of ``metrics.jsonl``.
    """
    path = run / TESTS_FILE
    if not path.is_file():
        lines = read_metrics(run / "metrics.jsonl")
        return [*itertools.chain.from_iterable(map(_in_old_line, lines))]
    text, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    found = []
    for row in itertools.islice(csv.reader(io.StringIO(text)), 1, None):
        at, site, part, examples, model, bn, metric, value = row
        about = (int(at), site, part, int(examples), model, bn, metric)
        found.append(Measured(*about, float(value)))
    return found


def read_tests(run: Path) -> pd.DataFrame:
    """Return the tests of the finished rounds of a run.

    The columns are the attributes of ``Measured``.
    """
    import pandas as pd

    table = pd.DataFrame(stored_tests(run), columns=Measured._fields)
    return table[table["round"] <= len(read_metrics(run / "metrics.jsonl"))]


def _in_old_line(line: Mapping[str, Any]) -> Iterator[Measured]:
    """Yield the tests in a line of a run without ``tests.csv``."""
    at = line["round"]
    value_of = {key: line[key] for key in line if isinstance(line[key], float)}
    for (part, bn), prefix in {**_PREFIXES, (VALIDATION, RUNNING): VALIDATION}.items():
        for metric in _MEASURED:
            if f"{prefix}-{metric}" in value_of:
                value = value_of[f"{prefix}-{metric}"]
                yield Measured(at, "", part, 0, "global", bn, metric, value)
    yield from of_clients(at, line.get("clients", {}))
    names = {name: bn for bn, name in _HELD_OUT_NAMES.items()}
    for site, tests in line.get(HELD_OUT, {}).items():
        for key, value in tests.items():
            name, _, metric = key.rpartition("-")
            if key != NUM_EXAMPLES and value is not None:
                count, bn = tests[NUM_EXAMPLES], names.get(name, name)
                yield Measured(at, site, HELD_OUT, count, "global", bn, metric, value)
    for key, of_domains in line.get("domains", {}).items():
        for (part, bn), prefix in _PREFIXES.items():
            metric = key.removeprefix(f"{prefix}-")
            if part == "test" and metric in _MEASURED:
                for domain, value in of_domains.items():
                    result = math.nan if value is None else value
                    name = f"{DOMAIN}{domain}"
                    yield Measured(at, "", name, 0, "global", bn, metric, result)
