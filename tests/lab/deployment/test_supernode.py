"""The start of a SuperNode compares its clock with the clock of the SuperLink."""

from __future__ import annotations

import datetime
import time
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader

import pytest
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE

from tests.support.checkout import ROOT

LOADER = SourceFileLoader("supernode", str(ROOT / "docker/flower-supernode"))
supernode = module_from_spec(spec_from_loader("supernode", LOADER))
LOADER.exec_module(supernode)


@pytest.fixture(params=["TLS", "another CA", "insecure"])
def words(request, certs, serve):
    """Serve the date, and return the arguments of a SuperNode for this server."""
    if request.param == "insecure":
        return [f"--superlink=127.0.0.1:{serve(None)}", "--insecure"]
    root = "ca/ca.crt" if request.param == "TLS" else "node-1/server.crt"
    port = serve(certs / "superlink")
    return ["--superlink", f"127.0.0.1:{port}", f"--root-certificates={certs / root}"]


def test_the_start_refuses_exactly_the_clocks_that_flower_refuses(words) -> None:
    """The HTTP date has whole seconds, so offsets are two seconds from the limits."""
    limits = (-SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE)
    day = datetime.timedelta(days=1).total_seconds()
    for ahead in (0, 3, 7, 8, 3600, 900 * day, -3, -303, -307, -day, -900 * day):
        problem = supernode.clock_problem(
            words, lambda ahead=ahead: time.time() + ahead
        )
        assert bool(problem) == (not limits[0] < -ahead < limits[1]), ahead


def test_a_superlink_that_does_not_answer_is_no_problem_of_the_clock() -> None:
    for words in ([], ["--superlink=127.0.0.1:1", "--root-certificates=/nowhere"]):
        assert supernode.clock_problem(words, lambda: 0.0) == ""
