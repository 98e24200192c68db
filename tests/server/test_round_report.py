"""The reasons of a node that is refused twice in a round."""

from __future__ import annotations

from fedbn_flwr.errors import INPUTS_NOT_FINITE, NOT_FINITE, coded
from fedbn_flwr.server.methods.method import Node
from fedbn_flwr.server.runs.round_report import RoundReport


def test_a_node_that_is_refused_twice_keeps_both_reasons_and_codes() -> None:
    report, node = RoundReport(1, "train"), Node(7)
    for code in (NOT_FINITE, INPUTS_NOT_FINITE):
        report.reject(node, coded(code, f"the text of {code}"))
    assert report.codes == {7: {NOT_FINITE, INPUTS_NOT_FINITE}}
    assert report.reasons[7] == "; ".join(
        f"the text of {code}" for code in (NOT_FINITE, INPUTS_NOT_FINITE)
    )
