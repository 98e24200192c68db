"""A replaced forward pass uses BatchNorm's own pass if both are equal.

The moments of all batches are merged and pooled.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.batchnorm import reestimation
from fedbn_flwr.batchnorm.reestimation import (
    MomentSums,
    batch_statistics,
    moments_of,
)
from fedbn_flwr.batchnorm.replaced_forward import (
    normalise,
    replace_forward,
    replaceable_layers,
)
from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.strategies.fbn import GlobalStatistics
from tests.support.fast import fast

KINDS = {
    "1d": (nn.BatchNorm1d, (6, 5)),
    "2d": (nn.BatchNorm2d, (4, 5, 3, 2)),
    "3d": (nn.BatchNorm3d, (4, 5, 1, 2, 2)),
}


def by_batch(layer: _BatchNorm, x: Tensor) -> Tensor:
    return normalise(layer, x, *batch_statistics(x))


def gradients(
    model: nn.Module, x: Tensor, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Return the output and all gradients, under amp if there is a dtype."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        out = model(x)
    wanted = [x, *model.parameters()]
    return [
        out.detach(),
        *torch.autograd.grad((out.float() * out.float().detach().sin()).sum(), wanted),
    ]


class Net(nn.Module):
    """One BatchNorm layer between compiled parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.first(x).relu()).tanh()
        return out


@pytest.fixture
def compiled() -> tuple[Net, Any, list[Any]]:
    """Return a model, its compiled form, and the graphs compiled so far."""
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = Net()
    return model, torch.compile(model, backend=backend), graphs


def test_a_compiled_model_is_not_compiled_anew_in_each_round(compiled: Any) -> None:
    model, fast, graphs = compiled
    counts = []
    for _ in range(4):
        share = nn.Parameter(torch.ones(4))  # one per round, like HBN's alpha
        undo = replace_forward(
            replaceable_layers(model),
            lambda layer, x, share=share: (
                normalise(layer, x, *batch_statistics(x)) * share
            ),
        )
        torch.testing.assert_close(fast(x := torch.randn(8, 4)), model(x))
        undo()
        counts.append(len(graphs))
    assert counts[0] > 0
    assert counts == counts[:1] * 4


@pytest.mark.parametrize("warm_up", [True, False])
def test_a_compiled_model_whose_inputs_are_measured_is_compiled_once(
    compiled: Any, warm_up: bool
) -> None:
    """The steps are more than the new graphs that torch's compiler allows.

    The measured sums change with every step.
    """
    model, fast, graphs = compiled
    counts = []
    for _ in range(2):
        hook = GlobalStatistics(warm_up)
        hook.begin(model)
        for _ in range(10):
            fast(torch.randn(8, 4))
            counts.append(len(graphs))
        hook.end(model)
        assert hook.reply()["bn-moments"]["norm.count"] == 80
    assert counts[0] > 0
    # torch 2.8 compiles one graph more for a second hook, 2.14 none
    anew = counts[10] - counts[0]
    assert anew <= (torch.__version__ < (2, 9))
    assert counts == [counts[0]] * 10 + [counts[0] + anew] * 10


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_batchnorm_written_out_is_torchs_and_leaves_the_running_statistics(
    kind: str, affine: bool
) -> None:
    make, shape = KINDS[kind]
    torch.manual_seed(0)
    model = nn.Sequential(make(5, eps=1e-3, affine=affine)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    x, plain = torch.randn(shape, dtype=torch.float64) * 3 + 1, copy.deepcopy(model)
    start = copy.deepcopy(model.state_dict())
    undo = replace_forward(replaceable_layers(model), by_batch)
    for own, want in zip(gradients(model, x), gradients(plain, x), strict=True):
        torch.testing.assert_close(own, want, rtol=1e-10, atol=1e-12)
    assert all(
        torch.equal(start[name], value) for name, value in model.state_dict().items()
    )
    assert torch.equal(
        model.eval()(x), plain.load_state_dict(start) and plain.eval()(x)
    )
    undo()
    assert "forward" not in vars(model[0])
    model.train()(x)
    assert model[0].num_batches_tracked == 1


@pytest.mark.parametrize("amp", [True, False], ids=["amp", "bfloat16 model"])
def test_bfloat16_is_computed_in_float32(amp: bool) -> None:
    """Statistics in bfloat16 would be wrong by a tenth far from zero.

    Here, only input and output are rounded.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5))
    x = torch.randn(4, 2, 6, 6) + 50
    if not amp:
        model, x = model.bfloat16(), x.bfloat16()
    seen: list[Tensor] = []

    def compute(layer: _BatchNorm, x: Tensor) -> Tensor:
        seen.extend((x.detach(), *batch_statistics(x)))
        return by_batch(layer, x)

    replace_forward(replaceable_layers(model), compute)
    out, *found = gradients(model, x, torch.bfloat16 if amp else None)
    y, mean, var = seen
    assert (y.dtype, mean.dtype, var.dtype, out.dtype) == (
        torch.bfloat16,
        torch.float32,
        torch.float32,
        y.dtype,
    )
    torch.testing.assert_close(
        out.double(), nn.BatchNorm2d(5).double()(y.double()), rtol=0, atol=0.02
    )
    assert [g.dtype for g in found] == [x.dtype, *(p.dtype for p in model.parameters())]


@pytest.mark.parametrize(
    ("affine", "memory_format"),
    [
        *((True, torch.channels_last), (False, torch.contiguous_format)),
        *fast([(False, torch.channels_last), (True, torch.contiguous_format)]),
    ],
)
def test_gradients_are_those_of_differences(
    affine: bool, memory_format: torch.memory_format
) -> None:
    """First and second derivatives of every argument treat no statistic as constant."""
    generator = torch.Generator().manual_seed(0)
    layer = nn.BatchNorm2d(3, affine=affine).double()
    x = torch.rand((4, 3, 2, 2), generator=generator).double()
    mean = torch.rand((3,), generator=generator).double()
    var = torch.rand((3,), generator=generator).double()
    x = x.contiguous(memory_format=memory_format)
    own = tuple(
        parameter.data.uniform_(0.5, 1.5, generator=generator)
        for parameter in layer.parameters()
    )

    def out(x: Tensor, mean: Tensor, var: Tensor, *parameters: Tensor) -> Tensor:
        given = SimpleNamespace(
            eps=layer.eps,
            **dict(zip(("weight", "bias"), parameters or (None, None), strict=True)),
        )
        return normalise(given, x, mean, var)  # type: ignore[arg-type]

    arguments = tuple(values.requires_grad_() for values in (x, mean, var, *own))
    expected = nn.functional.batch_norm(
        x, mean.detach(), var.detach(), *own, training=False, eps=layer.eps
    )
    assert torch.equal(out(*arguments), expected)
    for function, given in ((out, arguments), (batch_statistics, (x,))):
        assert torch.autograd.gradcheck(function, given)
        assert torch.autograd.gradgradcheck(function, given)
    by_function = torch.func.grad(lambda x: batch_statistics(x)[1].sum())(x.detach())
    torch.testing.assert_close(
        by_function, 2 * (x - x.mean((0, 2, 3), keepdim=True)).detach() / 16
    )


class Renormalised(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def test_a_layer_with_a_forward_pass_of_its_own_is_refused_by_name() -> None:
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Sequential(Renormalised(5)))
    with pytest.raises(
        NormLayerError,
        match=r"'1\.0' is a Renormalised with a custom forward pass",
    ):
        replace_forward(replaceable_layers(model), by_batch)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("kind", KINDS)
def test_an_input_of_other_dimensions_is_refused_as_by_the_layer(kind: str) -> None:
    make, shape = KINDS[kind]
    layer, x = make(5), torch.randn(*shape, 1, 1)
    with pytest.raises(ValueError, match="expected") as of_torch:
        layer(x)
    model = nn.Sequential(layer)
    replace_forward(replaceable_layers(model), by_batch)
    with pytest.raises(ValueError, match="expected") as ours:
        model(x)
    assert str(ours.value) == str(of_torch.value)


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_sums_over_batches_are_the_moments_of_all_values(
    offset: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are more calls than kept moments, so moments are merged."""
    monkeypatch.setattr(reestimation, "_KEPT", 2)
    layer, sums = nn.BatchNorm2d(3), MomentSums()
    x = torch.randn(7, 3, 2, 2, dtype=torch.float64) + offset
    for batch in x.split(3):  # the last batch has one example
        sums.add(layer, batch, batch_statistics(batch) if offset else None)
        assert len(sums._moments[layer]) == 1
    found, want = sums.by_path(layer)[""], moments_of(x)
    assert found.count == want.count == 28
    torch.testing.assert_close(found.mean, want.mean, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(found.m2, want.m2, rtol=1e-9, atol=0)
