"""FedWon: FedAvg of a model without BatchNorm; AGC by hand; what it refuses."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.nn import functional as F

from fedbn_flwr.messages.records import tensors
from fedbn_flwr.strategies import FedAvg, FedWon

SIZES = (6, 13, 9)
RATE, CLIPPING = 0.5, 0.02


def test_fedwon_without_agc_is_fedavg_bit_for_bit(
    federate, datasets, wsconv_net, same_bits
) -> None:
    plain = federate(FedAvg(), wsconv_net, datasets).state
    off = federate(FedWon(agc=0), wsconv_net, datasets).state
    clipped = federate(FedWon(agc=CLIPPING), wsconv_net, datasets).state
    same_bits(off, plain)
    assert (clipped["1.weight"] != plain["1.weight"]).any()


@pytest.mark.parametrize(
    ("name", "options", "shape", "head"),
    [
        ("wsconv_net", {}, (5,), "4."),
        ("torchvision_net", {"norm": False}, (3, 40, 40), "fc."),
    ],
)
def test_fedwon_equals_clipping_by_hand(
    name: str, options, shape, head: str, federate, points, request
) -> None:
    """One step with weight decay: each row of a weight, each vector as a whole, the
    last layer left out.

    torchvision's network has scaled standardised convolutions in place of its BatchNorm
    layers.
    """
    data, decay = points(8, 1, shape), 0.1
    model = functools.partial(request.getfixturevalue(name), **options)
    run = federate(
        FedWon(
            agc=CLIPPING, min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1
        ),
        *(model, [data]),
        **{
            "rounds": 1,
            "rate": RATE,
            "batch_size": 0,
            "local_steps": 1,
            "weight_decay": decay,
        },
    )
    net = model()
    F.cross_entropy(net(data.inputs), data.targets).backward()
    clipped = 0
    for name, p in net.named_parameters():
        g = p.grad.clone()
        rows = g.unbind(0) if g.dim() > 1 else (g,)
        if not name.startswith(head):
            for row, weight in zip(
                rows,
                p.detach().unbind(0) if g.dim() > 1 else (p.detach(),),
                strict=True,
            ):
                limit = CLIPPING * max(float(weight.norm()), 1e-3)
                if float(row.norm()) > limit:
                    row *= limit / float(row.norm())
                    clipped += 1
        want = p.detach() - RATE * (g + decay * p.detach())
        torch.testing.assert_close(
            tensors(run.state)[name], want, rtol=1e-12, atol=1e-14, msg=name
        )
    assert clipped > 2
