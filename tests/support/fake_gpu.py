"""A fake GPU. Its tensors report ``cuda:0`` but are in the CPU's memory.

Like a GPU it refuses an operation on tensors of two devices, except CPU scalars in
elementwise operations, CPU indices and copies; a passed CPU generator; and numpy. It
also refuses a copy to the CPU that does not block, because on a GPU a reader could be
earlier than its end. Operations run on the CPU, so the values equal the CPU's values.
The fake GPU counts kernels, the times that the CPU waits for a value, and uploads.

It does not imitate the GPU's own default generator (draws come from the CPU), mixed
precision (autocast does nothing), streams, memory, the ``foreach`` path of optimizers,
and other processes. ``torch.save`` and ``copy.copy`` work on a GPU, but raise here.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from fedbn_flwr.lab import objects_of_config

__all__ = ["Costs", "fake_gpu"]

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
_INDEXING = {"index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"}
# The size of their result, or their answer, depends on values, so the CPU waits.
_WAITING = {
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "repeat_interleave",
}
_WAITING |= {
    "_local_scalar_dense",
    "equal",
    "allclose",
    "is_nonzero",
    "linalg_inv_ex",
    "_linalg_check_errors",
}


class Costs:
    """The operations of the fake GPU.

    Attributes:
        launches: kernels started, by operation.
        reads: times that the CPU waited for a value, by operation.
        uploads: copies from the CPU's memory. The CPU also waits for them, unless
            their source is pinned.
    """

    def __init__(self) -> None:
        self.launches = Counter()
        self.reads = Counter()
        self.uploads = 0


_costs = Costs()


class _OnGpu(Tensor):
    """A tensor on the fake GPU. C++ sees it on "meta" and sends its calls here."""

    __slots__ = ("inner",)  # no attribute, which a message would change
    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> _OnGpu:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device="meta",
        )
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __init__(self, inner: Tensor) -> None:
        """All is done in ``__new__``."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]  # sets the shape, or raises
        self.inner = value.inner  # type: ignore[attr-defined]

    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(_index(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_index(index), value)

    def new_tensor(self, data: Any, **options: Any) -> Tensor:  # type: ignore[override]
        return torch.tensor(data, **{"dtype": self.dtype, "device": GPU, **options})

    def tolist(self):
        _costs.reads["tolist"] += 1
        return self.inner.tolist()

    def numpy(self, **_: Any):
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first"
        )

    __array__ = numpy

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def __repr__(self, **_: Any) -> str:
        return f"on_gpu({self.inner})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user support the deepcopy"
                " protocol on cuda:0"
            )
        if id(self) not in memo:
            made = memo[id(self)] = _OnGpu(self.inner.clone()).requires_grad_(
                self.requires_grad
            )
            made.grad = None if self.grad is None else _OnGpu(self.grad.inner.clone())  # type: ignore[attr-defined]
            if isinstance(self, torch.nn.Parameter):
                made._is_param = True  # type: ignore[attr-defined]  # what makes torch see a Parameter
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any):
        raise TypeError("a tensor of cuda:0 would be pickled")

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ):
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        _refuse_two_devices(name, func, args, kwargs)
        inner_args, inner_kwargs = tree_map(_inner, args), tree_map(_inner, kwargs)
        if name == "copy_" and not isinstance(args[0], _OnGpu):
            _costs.reads[name] += 1
            args[0].copy_(args[1].inner)
            return args[0]
        if (
            (device := kwargs.get("device")) is not None
            and not _on_gpu(device)
            and torch.device(device) == CPU
        ):
            _costs.reads[name] += name == "_to_copy"
            return func(*inner_args, **inner_kwargs)
        _count(name, func, args)
        if device is not None:
            inner_kwargs["device"] = CPU
        made = tree_map(_outer, func(*inner_args, **inner_kwargs))
        return return_and_correct_aliasing(func, args, kwargs, made)


def _outer(value: Any):
    return _OnGpu(value) if isinstance(value, Tensor) else value


def _inner(value: Any):
    return value.inner if isinstance(value, _OnGpu) else value


def _index(index: Any):
    """Return the index with tensors instead of sequences.

    C++ would put sequences on "meta", without values.
    """
    if isinstance(index, tuple):
        return tuple(
            torch.tensor(part) if isinstance(part, list | tuple | range) else part
            for part in index
        )
    return torch.tensor(index) if isinstance(index, list | range) else index


def _count(name: str, func: Any, args: Any) -> None:
    if not func.is_view and name != "detach":
        _costs.launches[name] += 1
    indices = [i for i in args[1] if i is not None] if name in _INDEXING else []
    _costs.reads[name] += name in _WAITING or any(
        i.dtype in (torch.bool, torch.uint8) for i in indices
    )
    _costs.uploads += sum(not isinstance(i, _OnGpu) for i in indices)
    _costs.uploads += name == "copy_" and not isinstance(args[1], _OnGpu)


def _refuse_two_devices(name: str, func: Any, args: Any, kwargs: Any) -> None:
    """Raise RuntimeError for an operation that a GPU cannot do."""
    given = tree_leaves((args, kwargs))
    if any(isinstance(value, torch.Generator) for value in given):
        raise RuntimeError(
            f"Expected a 'cuda' device type for generator but found 'cpu' in {name}"
        )
    if name in ("copy_", "_to_copy"):
        return
    if name in _INDEXING:
        if not isinstance(args[0], _OnGpu):
            raise RuntimeError(
                "indices should be either on cpu or on the same device as the indexed"
                " tensor (cpu)"
            )
        given = [value for value in (args[0], *args[2:3]) if isinstance(value, Tensor)]
    elsewhere = [
        value
        for value in given
        if isinstance(value, Tensor) and not isinstance(value, _OnGpu)
    ]
    # Other operations may read a scalar of the CPU.
    scalars = name not in ("stack", "cat", "equal")
    # the arguments that the function writes to, given by place or by name
    written = []
    for place, argument in enumerate(func._schema.arguments):
        alias = argument.alias_info
        if alias is None or not alias.is_write:
            continue
        value = kwargs.get(argument.name)
        if place < len(args):
            value = args[place]
        written += tree_leaves(value)
    for value in elsewhere:
        if value.dim() > 0 or not scalars or any(value is own for own in written):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found cuda:0 and"
                f" cpu in {name}"
            )


def _on_gpu(device: Any) -> bool:
    """Return whether a device is the fake GPU.

    Raises:
        RuntimeError: the device is another GPU.
    """
    if device is None or (place := torch.device(device)).type != "cuda":
        return False
    if place.index:
        raise RuntimeError(f"CUDA error: invalid device ordinal ({place})")
    return True


_FACTORIES = """
arange as_tensor empty empty_like eye full full_like linspace ones ones_like rand rand_like randint randn randn_like
randperm tensor zeros zeros_like
"""


def _factory(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return torch's function ``make`` with the fake GPU for ``device="cuda"``."""

    def made(
        *args: Any, device: Any = None, requires_grad: bool = False, **kwargs: Any
    ) -> Tensor:
        if not _on_gpu(device):
            return make(*args, device=device, requires_grad=requires_grad, **kwargs)
        if kwargs.get("generator") is not None:
            raise RuntimeError(
                "Expected a 'cuda' device type for generator but found 'cpu'"
            )
        _costs.launches[make.__name__] += 1
        _costs.uploads += make.__name__ == "tensor"
        return _OnGpu(
            make(*tree_map(_inner, args), device=CPU, **kwargs)
        ).requires_grad_(requires_grad)

    def as_tensor(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
        if isinstance(data, Tensor):
            return data.to(device or data.device, dtype or data.dtype)
        return _to(make(data, dtype=dtype), device or CPU)

    return as_tensor if make.__name__ == "as_tensor" else made


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return ``Tensor.to`` with the fake GPU."""
    other = kwargs.get("other", args[0] if args else None)
    flags = [value for value in args if isinstance(value, bool)]  # non_blocking, copy
    copy = kwargs.get("copy", flags[1] if len(flags) > 1 else False)
    if isinstance(other, Tensor):
        device, dtype = other.device, other.dtype
    else:
        placed = [
            value
            for value in (*args, kwargs.get("device"))
            if isinstance(value, str | int | torch.device)
        ]
        device = next((value for value in placed if not isinstance(value, bool)), None)
        dtype = next(
            (
                value
                for value in (*args, kwargs.get("dtype"))
                if isinstance(value, torch.dtype)
            ),
            None,
        )
    options = {"dtype": dtype, "copy": copy}
    if kwargs.get("memory_format") is not None:
        options["memory_format"] = kwargs["memory_format"]
    on_gpu = _on_gpu(device)
    if device is None or (on_gpu and isinstance(tensor, _OnGpu)):
        return _torch_to(tensor, **options)
    if not on_gpu:
        if isinstance(tensor, _OnGpu) and kwargs.get(
            "non_blocking", flags[:1] == [True]
        ):
            raise RuntimeError(
                "a copy from cuda:0 that does not block may be read before it has ended"
            )
        return _torch_to(tensor, torch.device(device), **options)
    _costs.uploads += 1
    return _Upload.apply(_torch_to(tensor, **options))


_torch_to = Tensor.to


class _Upload(torch.autograd.Function):
    """A copy to the GPU, with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _OnGpu(x.detach().clone())

    @staticmethod
    def backward(ctx: Any, grad: Any):
        return grad.inner


class _OfTheEngine(TorchDispatchMode):
    """Put autograd's zeros for outputs without a gradient on the fake GPU."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ):
        kwargs = kwargs or {}
        if kwargs.get("device") == torch.device("meta"):
            return _OnGpu(func(*tree_map(_inner, args), **{**kwargs, "device": CPU}))
        return func(*args, **kwargs)


@contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Costs]:
    """Provide a fake GPU in the block, and count its operations.

    It applies to all threads of this process that start in the block.
    """
    start = threading.Thread.run

    def run(thread: threading.Thread) -> None:
        with _OfTheEngine():  # modes belong to a thread
            start(thread)

    def of_objects() -> bool:
        return sys._getframe(2).f_globals["__name__"] == objects_of_config.__name__

    global _costs
    _costs = Costs()
    with monkeypatch.context() as patch, warnings.catch_warnings():
        # autocast warns that CUDA is not available
        warnings.filterwarnings("ignore", message="CUDA is not available")
        patch.setattr(threading.Thread, "run", run)
        patch.setattr(Tensor, "to", _to)
        patch.setattr(Tensor, "cuda", lambda tensor, *_, **__: _to(tensor, GPU))
        patch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
        # If torch finds a GPU, it asks the driver. Therefore only a run's check
        # of `device` gets this answer.
        patch.setattr(torch.cuda, "is_available", lambda: of_objects())
        patch.setattr(torch.cuda, "device_count", lambda: int(of_objects()))
        for name in _FACTORIES.split():
            patch.setattr(torch, name, _factory(getattr(torch, name)))
        with _OfTheEngine():
            yield _costs
