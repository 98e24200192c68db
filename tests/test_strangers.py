"""Five small models of other packages equal the same rounds in plain torch.

benchmarks/strangers.py has more models.
"""

from __future__ import annotations

import pytest

from tests.support.fast import fast

# A plain and a wrapped model; timm has the smallest models.
QUICK = [
    ("timm:test_resnet", "plain", "fedbn", "equal"),
    ("timm:test_byobnet", "wrapped", "fixbn", "equal"),
]
OTHERS = [
    ("timm:test_byobnet", "eval", "fedtan", "refused"),
    ("timm:test_byobnet", "weight-norm", "fedtan", "equal"),
    ("torchvision:shufflenet_v2_x0_5", "plain", "fedbn", "equal"),
    ("timm:test_resnet", "plain", "fedavg", "equal"),
    ("timm:test_efficientnet", "plain", "fedtan", "equal"),
    ("timm:lcnet_035", "plain", "fixbn", "equal"),
    ("timm:test_byobnet", "eval", "fedbn", "equal"),
]


@pytest.mark.parametrize(
    ("name", "way", "method", "verdict"), fast(QUICK + OTHERS, *QUICK)
)
def test_a_strangers_model_equals_plain_torch_or_is_refused_in_words(
    name: str, way: str, method: str, verdict: str
) -> None:
    from strangers import compared

    if name.startswith("timm"):
        pytest.importorskip("timm")
    line = compared(name, way, method, size=32)
    assert line.verdict == verdict, line.what
