"""Additional records that only some clients send.

The server uses the records of the clients that sent them: momentum, and shared BN
parts. A client sends no record in some rounds or leaves out a layer. The oracle reads
the replies as they arrive. Its result is compared with the record that the server sends
in the next round, or with the final model.
"""

from __future__ import annotations

import numpy as np
import pytest

from fedbn_flwr.messages.records import from_record, to_record
from fedbn_flwr.strategies import FedAvg, FedBN
from tests.support.bad_replies import BAD, spoiling
from tests.support.fast import fast
from tests.support.many_layers import two_layers
from tests.support.written_out import close

SIZES = (6, 13, 9)
SHARED = "averaged-bn"
RUNS = [(SHARED, "in round 2"), ("momentum", "a layer"), (SHARED, "always")]
RUNS += [("momentum", "always"), ("momentum", "in round 2")]


@pytest.mark.parametrize(("record", "lost"), fast(RUNS, 0, 1, 4))
def test_the_server_takes_those_who_have_it(
    federate, datasets, record: str, lost: str
) -> None:
    """The last shared record of a client counts until the client sends a new one."""

    def spoil(content) -> None:
        kept = {
            name: array
            for name, array in from_record(content[record]).items()
            if lost == "a layer" and not name.startswith("4.")
        }
        content[record] = to_record(kept)

    strategy, rounds, momentum = FedBN(eval_on=SHARED), 2, 0.0
    if record == "momentum":
        strategy, rounds, momentum = FedAvg(momentum_scope="global"), 3, 0.9
    run = federate(
        strategy,
        two_layers,
        datasets,
        rounds=rounds,
        wrap=spoiling(spoil, rounds=(1, 2) if lost == "always" else (2,)),
        sgd_momentum=momentum,
        local_steps=2,
    )
    assert not any(report.rejected for report in run.reports)
    replies = run.grid.of("train", replies=True)[:6]  # three clients, two rounds
    records = [from_record(reply.content[record]) for reply in replies]
    first, sent = records[:3], records[3:]
    assert bool(sent[BAD]) == (lost == "a layer")
    found = run.state
    if record == SHARED:
        sent = [new or old for new, old in zip(sent, first, strict=True)]
    else:
        found = from_record(run.grid.of("train")[-1].content[record])
    wanted = {}
    for name in sent[0]:
        having = [i for i, own in enumerate(sent) if name in own]
        values = [sent[i][name] for i in having]
        wanted[name] = np.average(values, axis=0, weights=[SIZES[i] for i in having])
        if name.endswith("num_batches_tracked"):
            wanted[name] = np.max(values)
    close(found, wanted, atol=1e-15)
