"""Exchanges, refused models and the state after an error."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from fedbn_flwr.batchnorm.sync import (
    combine,
    refuse_unusable,
    synchronised,
    try_synchronised_step,
)
from fedbn_flwr.errors import NOT_FINITE, ConfigError, NormLayerError, ReplyError
from fedbn_flwr.strategies.fedtan import SynchroniseFirstStep
from fedbn_flwr.strategies.hbn import mixed_forward
from tests.support.strange_layers import InPlace


def alone(tag: str, tensor: Tensor) -> Tensor:
    """Combine the tensor of the only client of a round."""
    return combine(tag, [tensor], [1.0])


def small() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(5, 3), nn.BatchNorm1d(3)).double()


def inputs(n: int = 4) -> Tensor:
    return torch.linspace(-1, 2, 4 * n, dtype=torch.float64).view(n, 4).cos()


block = functools.partial(synchronised, batch_size=4, union_batch_size=8)
"""The block of a step on 4 of 8 examples."""


def step(model: nn.Module, reduce=alone, n: int = 4, union: int = 8) -> None:
    with synchronised(model, reduce, batch_size=n, union_batch_size=union):
        model(inputs(n)).square().sum().backward()


def watching(tags: list[str]) -> Callable[[str, Tensor], Tensor]:
    """Return the only client's exchange, with a record of its tags."""

    def reduce(tag: str, tensor: Tensor) -> Tensor:
        tags.append(tag)
        return alone(tag, tensor)

    return reduce


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters()]


def same(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> None:
    torch.testing.assert_close([*ours], [*theirs], rtol=0, atol=0)


FORWARD = "mean/0/1 variance/0/1 mean/1/4 variance/1/4"


@pytest.mark.parametrize(
    ("exchanges", "backward", "tags"),
    [
        ("3L+1", "global", f"{FORWARD} gradients/1/4 gradients/0/1"),
        ("2L+1", "global", "moments/0/1 moments/1/4 gradients/1/4 gradients/0/1"),
        ("3L+1", "own", FORWARD),
        ("2L+1", "own", "moments/0/1 moments/1/4"),
    ],
)
def test_tags_shapes_and_types_of_the_exchanges(exchanges, backward, tags):
    seen = []
    model = small().float()

    def reduce(tag: str, tensor: Tensor) -> Tensor:
        assert not tensor.requires_grad
        assert tensor.dtype == torch.float32
        seen.append(tag)
        kind, _, path = tag.split("/")
        channels = {"1": 5, "4": 3}[path]
        rows = {"moments": (3,), "gradients": (2,)}.get(kind, ())
        # The examples are a further column.
        per_element = {"mean": [1.0], "moments": [1.0, 0.0, 0.0]}.get(kind, [])
        assert tensor.shape == (*rows, channels + bool(per_element))
        assert tensor[..., channels:].flatten().tolist() == per_element
        return tensor

    with block(model, reduce, exchanges=exchanges, backward=backward) as watched:
        model(inputs().float()).square().sum().backward()
    assert " ".join(seen) == tags
    assert watched.num_layers == 2
    assert watched.num_exchanges == len(seen)


class Pending(BaseException):
    """A BaseException that is not an Exception."""


@pytest.mark.parametrize("error", [ReplyError, Pending])
@pytest.mark.parametrize(
    "stop", ["mean/0/1", "variance/1/4", "gradients/1/4", "gradients/0/1"]
)
def test_errors_of_reduce_pass_through_and_all_hooks_are_removed(stop, error):
    model, raised = small(), error("dropped")

    def reduce(tag: str, tensor: Tensor) -> Tensor:
        if tag == stop:
            raise raised
        return alone(tag, tensor)

    start = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(error) as caught:
        step(model, reduce)
    assert caught.value is raised
    assert not _get_current_function_mode_stack()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    # With state and gradients restored, the redone step equals an undisturbed one.
    model.load_state_dict(start)
    model.zero_grad()
    step(model)
    fresh = small()
    step(fresh)
    same(gradients(model), gradients(fresh))
    same(model.buffers(), fresh.buffers())


def test_only_the_thread_of_the_step_is_synchronised():
    model, other, tags = small(), small(), []
    with block(model, watching(tags)):
        thread = threading.Thread(target=lambda: other(inputs()).sum().backward())
        thread.start()
        thread.join()
        assert tags == []
        model(inputs())
    assert len(tags) == 4
    model(inputs()).sum().backward()
    assert len(tags) == 4


def test_a_model_that_two_clients_share_is_refused():
    """Otherwise, their gradients and statistics would silently be mixed."""
    model = small()
    with (
        block(model, alone),
        pytest.raises(NormLayerError, match="Build a model in each call"),
    ):
        step(model)
    step(model)


def test_backward_may_run_in_another_thread():
    """Autograd does this on an accelerator."""
    model, reference = small(), small()
    step(reference)
    with block(model, alone):
        loss = model(inputs()).square().sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    same(gradients(model), gradients(reference))


def test_every_exchange_is_made_in_the_thread_of_the_step():
    """Autograd has one thread for a GPU.

    In this thread, the clients of one process would wait for one another for ever.
    """
    threads, device_threads = set(), torch._C._is_multithreading_enabled

    def reduce(tag: str, tensor: Tensor) -> Tensor:
        threads.add((threading.get_ident(), device_threads()))
        if tag.startswith("gradients/0/1"):
            raise ConfigError("stop")
        return tensor

    assert device_threads()
    with pytest.raises(ConfigError, match="stop"):
        step(small(), reduce)
    assert threads == {(threading.get_ident(), False)}
    assert device_threads(), "the setting outlives the step"


def test_eval_mode_is_not_synchronised_but_no_grad_is():
    tags = []
    model = small().eval()
    with block(model, watching(tags)):
        model(inputs()).sum().backward()
        assert tags == []
        with torch.no_grad():
            model.train()(inputs())
    assert " ".join(tags) == FORWARD


class Checkpointed(nn.Module):
    def __init__(self, run) -> None:
        super().__init__()
        self.body, self.run = small(), run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.body, x.requires_grad_())


class Recompute(torch.autograd.Function):
    """Activation checkpointing of another library."""

    @staticmethod
    def forward(ctx, body, x):
        ctx.body = body
        ctx.save_for_backward(x)
        return body(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.body(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


class Arithmetic(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / x.std(0)


reentrant = functools.partial(checkpoint, use_reentrant=True)
plain_checkpoint = functools.partial(checkpoint, use_reentrant=False)


def plain_norm(x: Tensor) -> Tensor:
    return functional.batch_norm(x, None, None, training=True)


def never(tag: str, tensor: Tensor) -> Tensor:
    pytest.fail(f"exchange {tag} before the refusal")


INSIDE = r"runs inside torch\.utils\.checkpoint"
REFUSED = {
    # The step, the error and its words.
    "one value": (
        lambda: step(small(), n=1, union=1),
        NormLayerError,
        r"layer '1' has 1 values per channel in the union.*\(1, 5\)",
    ),
    "reentrant checkpoint": (
        lambda: step(Checkpointed(reentrant), never),
        NormLayerError,
        rf"layer 'body\.1' {INSIDE}",
    ),
    "checkpoint": (
        lambda: step(Checkpointed(plain_checkpoint), never),
        NormLayerError,
        rf"layer 'body\.1' {INSIDE}",
    ),
    "function in a checkpoint": (
        lambda: step(Checkpointed(lambda _, x: reentrant(plain_norm, x))),
        NormLayerError,
        "functional batch_norm of call 0 runs inside",
    ),
    "computed again": (
        lambda: step(Checkpointed(Recompute.apply)),
        NormLayerError,
        r"layer 'body\.1'.*called again in the backward pass",
    ),
    "arithmetic": (
        lambda: step(nn.Sequential(nn.Linear(4, 3), Arithmetic(3)).double()),
        NormLayerError,
        r"layer '1' \(Arithmetic\) cannot be synchronised, because",
    ),
    "several devices": (
        lambda: step(nn.Sequential(nn.DataParallel(small()))),
        NormLayerError,
        "module '0' is a DataParallel",
    ),
    "an answer of another shape": (
        lambda: step(small(), lambda tag, t: t.expand(2, -1)),
        ReplyError,
        r"'mean/0/1' was answered with shape \(2, 6\), but \(6,\) was sent",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_steps_that_cannot_be_synchronised_are_refused_by_name(what):
    call, error, words = REFUSED[what]
    with pytest.raises(error, match=words):
        call()


def test_one_value_per_client_is_enough_if_the_union_has_more():
    step(small(), n=1, union=2)
    with (
        pytest.raises(NormLayerError, match="layer '1' gets no rows"),
        synchronised(model := small(), alone, batch_size=1, union_batch_size=4),
    ):
        model(inputs(0))


def test_a_gradient_of_gradients_is_refused_by_its_layer():
    model = small()
    with block(model, alone):
        loss = model(inputs()).square().sum()
        with pytest.raises(
            NormLayerError, match=r"layer '4' .*\(create_graph=True\).* fixbn"
        ):
            loss.backward(create_graph=True)


def test_a_second_backward_pass_is_refused():
    model = small()
    with block(model, alone):
        loss = model(inputs()).square().sum()
        loss.backward(retain_graph=True)
        with pytest.raises(
            NormLayerError, match="layer '4' was reached by a second backward pass"
        ):
            loss.backward()


def test_backward_outside_the_block_is_refused():
    model = small()
    with block(model, alone):
        loss = model(inputs()).square().sum()
    with pytest.raises(
        NormLayerError, match=r"'gradients/1/4' comes after the synchronised block"
    ):
        loss.backward()


def test_an_answer_of_another_type_is_converted():
    with block(small(), lambda tag, t: t.double().requires_grad_()) as watched:
        answer = watched.exchange("mean/0/1", torch.ones(5))
    assert answer.dtype == torch.float32
    assert not answer.requires_grad


class StaysInEval(nn.Sequential):
    """A network that keeps its BatchNorm in eval mode."""

    def train(self, mode=True):
        return super().train(False)


def with_strides(shape: tuple[int, ...], order: tuple[int, ...], gap: int) -> Tensor:
    """Return numbers (N, C, ...) whose dimensions have another order in memory."""
    made = torch.rand([shape[axis] + gap for axis in order]).double()
    x = made.permute([order.index(axis) for axis in range(len(shape))])
    return x[tuple(slice(size) for size in shape)].requires_grad_()


def strides_of(x: Tensor) -> list[int]:
    """Return the strides that matter, of dimensions with several elements."""
    return [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]


@pytest.mark.parametrize("gap", [0, 1])
@pytest.mark.parametrize("norm", ["synchronised", "hbn"])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
def test_outputs_and_gradients_have_the_strides_of_torch(kind, norm, gap) -> None:
    """Models rely on them: ``view`` after the layer would fail."""
    dims = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)}[kind]
    # One row of pixels may be in both formats.
    for size, dim in [(3, dim) for dim in dims] + [(1, 3)] * (3 in dims):
        shape = (4, 3, size, 2, 2)[:dim]
        for order in itertools.permutations(range(dim)):
            x, layer = with_strides(shape, order, gap), kind(3).double()
            wanted = copy.deepcopy(layer)(x)
            if norm == "hbn":
                ours = mixed_forward(layer, torch.full((3,), -800.0), x)
            else:
                with synchronised(layer, alone, batch_size=4, union_batch_size=4):
                    ours = layer(x)
                    (gradient,) = torch.autograd.grad(ours.square().sum(), x)
                (theirs,) = torch.autograd.grad(wanted.square().sum(), x)
                assert strides_of(gradient) == strides_of(theirs)
            assert strides_of(ours) == strides_of(wanted)
            torch.testing.assert_close(ours, wanted)


def test_a_step_in_eval_mode_is_refused():
    """It would be FedAvg's step under the name of FedTAN."""
    kept = StaysInEval(small()).eval()
    refused = pytest.raises(
        NormLayerError,
        match=r"no BatchNorm layer was called in train mode .* model\.train\(\)",
    )
    with refused:
        try_synchronised_step(kept, inputs(), len(inputs()))
    hook = SynchroniseFirstStep(
        SimpleNamespace(begin=lambda: 8, reduce=lambda tag, t: t), "3L+1", "global"
    )
    with refused, hook.around(0, kept, 4):
        kept(inputs()).sum().backward()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", ["function", "in place", "layer", "layer in place"])
def test_a_compiled_model_is_synchronised(way, backend):
    """The compilers may change an activation's input after their graph."""
    torch.compiler.reset()
    model, tags = nn.Sequential(InPlace(4)), []
    step(reference := copy.deepcopy(model))
    called = torch.compile(model, backend=backend) if way == "function" else model
    if way.endswith("in place"):
        (model if way == "in place" else model[0]).compile(backend=backend)
    elif way == "layer":
        called = nn.Sequential(torch.compile(model[0], backend=backend))
    step(called, watching(tags))
    path = "0._orig_mod.norm" if way == "layer" else "0.norm"
    assert tags == [f"{kind}/0/{path}" for kind in ("mean", "variance", "gradients")]
    torch.testing.assert_close(gradients(model), gradients(reference))


MOMENTS = torch.tensor([[1.0, 2.0, 0.25], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("tag", "tensor", "code", "said"),
    [
        ("median/0", torch.ones(2), "reply", "unknown kind"),
        ("mean/0", torch.ones(0), "reply", "of shape (0,)"),
        ("mean/0", torch.ones(2, dtype=torch.int64), "reply", "torch.int64"),
        ("mean/0", torch.tensor([NAN, 1.0]), NOT_FINITE, "the value nan"),
        ("mean/0", torch.tensor([1e16, 1.0]), NOT_FINITE, "the value 1e+16"),
        ("mean/0", torch.tensor([1.0, -0.5]), "reply", "-0.5 examples per element"),
        ("mean/0", torch.tensor([1.0, 0.0]), "reply", "0 examples per element"),
        ("mean/0", torch.tensor([1.0, INF]), NOT_FINITE, "the value inf"),
        ("variance/0", torch.tensor([1.0, -2.0]), "reply", "the variance -2"),
        ("gradients/0", torch.tensor([[1.0], [3e38]]), NOT_FINITE, "the value 3e+38"),
        ("moments/0", MOMENTS[:2], "reply", "of shape (2, 3)"),
        ("moments/0", MOMENTS * 1e16, NOT_FINITE, "the mean 2e+16"),
        ("moments/0", -MOMENTS, "reply", "the variance -1"),
    ],
)
def test_a_tensor_that_would_spoil_the_answer_is_refused(tag, tensor, code, said):
    refuse_unusable("moments/0", MOMENTS)
    with pytest.raises(ReplyError) as error:
        refuse_unusable(tag, tensor)
    assert (error.value.code, said in str(error.value)) == (code, True)


def test_a_batch_is_not_held_after_its_step() -> None:
    """It is freed before a collection, because it may fill a device's memory."""
    gc.disable()
    try:
        model, batch = small(), inputs()
        seen = weakref.ref(batch)
        with block(model, alone):
            model(batch).square().sum().backward()
        del batch
        assert seen() is None
    finally:
        gc.enable()
