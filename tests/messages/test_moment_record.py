"""Moments of BatchNorm layers as entries of a message."""

from __future__ import annotations

import pytest
import torch

from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.batchnorm.reestimation import Moments
from fedbn_flwr.messages.moment_record import decode_moments, encode_moments


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_sums_of_squares_of_a_model_in_half_precision_travel_in_float32(
    dtype: torch.dtype,
) -> None:
    """An M2 of 70,001 overflows float16 and is inexact in bfloat16.

    An M2 of 70,001 + 1e-9 occurs only in a float64 model.
    """
    like = dict.fromkeys(
        ("bn.running_mean", "bn.num_batches_tracked"), torch.zeros(1, dtype=dtype)
    )
    wide = torch.tensor([0.5], dtype=torch.float64)
    m2 = 70_001 + (1e-9 if dtype == torch.float64 else 0)
    mean = wide + (1e-12 if dtype == torch.float64 else 0)
    sent = encode_moments({"bn": Moments(9, mean, torch.full_like(wide, m2))}, like)
    arrays = {name: value.numpy() for name, value in sent.items()}
    shapes = {name: value.float().numpy() for name, value in like.items()}
    found = decode_moments(arrays, shapes, split_state(shapes))
    assert (found["bn"].mean.tolist(), found["bn"].m2.tolist()) == (mean.tolist(), [m2])
