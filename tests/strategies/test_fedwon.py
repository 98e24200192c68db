"""FedWon equals FedAvg with a model without BatchNorm."""

from __future__ import annotations

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
