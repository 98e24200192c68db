"""Each client puts validation examples aside and never trains on them.

Each tested round tests them.
"""

from __future__ import annotations

import pytest

from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.runs import serve
from tests.support.runs import values_of


@pytest.mark.parametrize(
    ("eval_on", "share", "asked"),
    [
        ("global", 0.3, []),
        ("global,personal-own", 0.3, ["own"]),
        ("personal-own,global", 0.3, ["own", "validation"]),
        ("personal-own", 0.0, ["own"]),
    ],
)
def test_clients_validate_where_their_own_models_decide(
    eval_on: str, share: float, asked: list[str]
) -> None:
    """Otherwise the server tests the global model on all validation examples."""
    settings = {"strategy": "fedbn", "eval-on": eval_on, "validation-share": share}
    assert serve.tests_of_clients(Config.make(settings), None) == asked


def test_the_main_metric_drives_the_result_and_early_stopping(quick_run) -> None:
    """Each metric chooses another round as the best. A loss must be low."""
    settings = {
        "num-server-rounds": 6,
        "early-stopping": 6,
        "validation-share": 0.3,
        "learning-rate": 0.5,
    }
    for metric, choose in (("loss", min), ("auroc", max)):
        summary, out = quick_run(**settings, **{"metrics": metric})
        validated = values_of(out, f"validation-{metric}")
        stopped = validated.index(choose(validated))
        assert summary["headline"] == f"test-{metric}"
        assert summary["best-validation"] == {
            "round": stopped + 1,
            f"validation-{metric}": validated[stopped],
        }
        tested = values_of(out, f"test-{metric}")
        assert summary["final"][f"test-{metric}"] == tested[stopped]
