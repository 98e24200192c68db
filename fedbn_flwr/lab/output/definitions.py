"""What the figures of a summary are: pooled over a test set, or a mean over clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedbn_flwr.batchnorm.adaptation import TestBN
from fedbn_flwr.messages.protocol import NUM_EXAMPLES, VALIDATION
from fedbn_flwr.server.params import TEST_BN

__all__ = ["CLIENTS", "HELD_OUT", "definitions"]

HELD_OUT = "held-out"
"""The key of the tests of held-out clients in a line of ``metrics.jsonl``, and the prefix of the means over them."""

CLIENTS = "-clients"  # ends the key with the number of clients that define a metric
_OF_SOME = {
    "-weighted": "mean over the same clients as the plain mean, weighted by their {} examples",
    "-seen": "plain mean over the clients among them that have trained in this run",
    "-unseen": "plain mean over the clients among them that have not trained in this run",
    CLIENTS: "number of clients whose {} examples define the metric",
}
_TESTED_ON = {"own": "its own test set", "global": "the whole test set", VALIDATION: "its own validation examples"}


def definitions(
    final: Mapping[str, Any],
    line: Mapping[str, Any],
    num_tested: int,
    federated: bool,
    by: TestBN | None = None,
    positive: str = "",
) -> dict[str, str]:
    """Return a sentence for each figure.

    Args:
        final: the figures by key.
        line: the line of ``metrics.jsonl`` that they come from.
        num_tested: number of examples of the whole test set.
        federated: there are clients.
        by: the BatchNorm statistics of tests that end in -test-bn.
        positive: the class that F1 and average precision are of, where there are two; "" if it has no name.
    """
    texts = {}
    for key in final:
        if key == "round":
            continue
        texts[key] = _definition(key, line, num_tested, federated)
        if positive and ("-f1" in key or "-auprc" in key):
            texts[key] += f"; the positive class is {positive}"
        if f"{TEST_BN}-" in key:
            texts[key] += f"; BatchNorm has statistics of the test inputs ({by})"
    return texts


def _definition(key: str, line: Mapping[str, Any], num_tested: int, federated: bool) -> str:
    if key == "domains":
        return "each figure by domain: test-...: pooled over its test set, personal-...: plain mean over its clients"
    if key.startswith("train-"):
        return "mean over the clients, weighted by their training examples" if federated else "mean over the examples"
    if key.startswith("test-"):
        but = " but for the held-out clients' examples" if HELD_OUT in line else ""
        return f"pooled over the whole test set{but}, {num_tested} examples"
    if key == HELD_OUT:
        return "tests of each client that never trains, by name"
    if key.startswith(HELD_OUT) and not key.endswith(CLIENTS):
        return "plain mean over the clients that never train, where it is defined"
    if key.startswith(f"{VALIDATION}-"):
        return "pooled over the validation examples of all clients"
    name = key.split("-")[1]
    for ending, text in _OF_SOME.items():
        if key.endswith(ending):
            return text.format(VALIDATION if name == VALIDATION else "test")
    total = sum(client.get(f"{name}-{NUM_EXAMPLES}", 0) > 0 for client in line.get("clients", {}).values())
    defined = line.get(key + CLIENTS, total)
    who = f"{total} clients" if defined == total else f"{defined} of {total} clients (the others do not define it)"
    return f"plain mean over {who}, each on {_TESTED_ON[name]}"
