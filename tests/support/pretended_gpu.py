"""A GPU that is not there: tensors that say ``cuda:0``, hold their values in the CPU's memory, and keep a GPU's rules.

The rules: the tensors of an operation lie on one device, except CPU scalars, CPU indices and copies; a generator of the
CPU draws nothing for the GPU; numpy and the disk read no GPU tensor. What breaks a rule raises, as on a GPU. Operations
are done on the CPU, so values are those of the CPU. What costs time on a GPU is counted. Autocast does nothing.
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

from fedbn_flwr.experiment import setup

__all__ = ["Costs", "pretended_gpu"]

GPU = torch.device("cuda", 0)
_INDEXING = {"index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"}


class Costs:
    """What was done on the pretended GPU.

    Attributes:
        launches: kernels started, by operation.
        reads: times that the CPU waited for a value, by operation.
        uploads: copies from the CPU's memory, which wait, too, unless the source is pinned.
    """

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self.uploads = 0


_costs = Costs()


class _OnGpu(Tensor):
    """A tensor on the pretended GPU. For torch's C++ it lies on "meta", whose operations all come here."""

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
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    def get_device(self) -> int:  # type: ignore[override]
        return 0

    def __getitem__(self, index: Any) -> Tensor:
        """Lists become tensors here: in C++ they would be put on "meta", without values."""
        if isinstance(index, tuple):
            index = tuple(torch.tensor(part) if isinstance(part, list) else part for part in index)
        return super().__getitem__(torch.tensor(index) if isinstance(index, list) else index)

    def new_tensor(self, data: Any, **_: Any) -> Tensor:  # type: ignore[override]
        return _OnGpu(torch.tensor(data, dtype=self.dtype))

    def tolist(self) -> Any:
        return _read(self, "tolist").tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    __array__ = numpy

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def __repr__(self, **_: Any) -> str:
        return f"on_gpu({self.inner})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            made = memo[id(self)] = _OnGpu(self.inner.clone()).requires_grad_(self.requires_grad)
            if isinstance(self, torch.nn.Parameter):
                made._is_param = True  # type: ignore[attr-defined]  # what makes torch see a Parameter
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a tensor of the GPU would be pickled")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        leaves = tree_leaves((args, kwargs))
        _same_device(name, args, leaves)
        given = tree_map(_inner, args), tree_map(_inner, kwargs)
        if name == "_to_copy" and kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu":
            _costs.reads[name] += 1
            return func(*given[0], **given[1])
        if name == "copy_" and not isinstance(args[0], _OnGpu):
            _costs.reads[name] += 1
            args[0].copy_(args[1].inner)
            return args[0]
        if name in ("_local_scalar_dense", "equal", "is_nonzero"):
            _costs.reads[name] += 1
            return func(*given[0], **given[1])
        if name in ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"):
            _costs.reads[name] += 1  # the size of the result depends on values
        if name == "copy_" and not isinstance(args[1], _OnGpu):
            _costs.uploads += 1
        if not func.is_view and name != "detach":
            _costs.launches[name] += 1
        if given[1].get("device") is not None:
            given[1]["device"] = "cpu"
        out = tree_map(lambda value: _OnGpu(value) if isinstance(value, Tensor) else value, func(*given[0], **given[1]))
        return return_and_correct_aliasing(func, args, kwargs, out)


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, _OnGpu) else value


def _read(tensor: _OnGpu, name: str) -> Tensor:
    _costs.reads[name] += 1
    return tensor.inner


def _same_device(name: str, args: Any, leaves: list[Any]) -> None:
    """Refuse an operation on tensors of two devices."""
    if name in ("copy_", "_to_copy"):
        return
    if name in _INDEXING:
        if isinstance(args[0], _OnGpu):
            values = args[2:3]
            leaves = [args[0], *(value for value in values if isinstance(value, Tensor))]
        else:
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
    for value in leaves:
        if isinstance(value, Tensor) and not isinstance(value, _OnGpu) and value.dim() > 0:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found cuda:0 and {value.device} in {name}"
            )
        if isinstance(value, torch.Generator):
            raise RuntimeError(f"Expected a 'cuda' device type for generator but found 'cpu' in {name}")


def _on_gpu(device: Any) -> bool:
    return isinstance(device, int) or (device is not None and torch.device(device).type == "cuda")


_FACTORIES = """
arange as_tensor empty empty_like eye full full_like linspace ones ones_like rand rand_like randint randn randn_like
randperm tensor zeros zeros_like
"""


def _factory(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return torch's function ``make`` for which ``device="cuda"`` means the pretended GPU."""

    def made(*args: Any, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> Tensor:
        if not _on_gpu(device):
            return make(*args, device=device, requires_grad=requires_grad, **kwargs)
        if kwargs.get("generator") is not None:
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        _costs.launches[make.__name__] += 1
        return _OnGpu(make(*tree_map(_inner, args), device="cpu", **kwargs)).requires_grad_(requires_grad)

    def as_tensor(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
        if isinstance(data, Tensor):
            return data.to(device or data.device, dtype or data.dtype)
        return made(data, dtype=dtype, device=device) if _on_gpu(device) else make(data, dtype=dtype, device=device)

    return as_tensor if make.__name__ == "as_tensor" else made


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return ``Tensor.to`` with the pretended GPU."""
    copy = kwargs.pop("copy", False)
    other = kwargs.get("other", args[0] if args else None)
    if isinstance(other, Tensor):
        device, dtype = other.device, other.dtype
    else:
        placed = [value for value in (*args, kwargs.get("device")) if isinstance(value, str | int | torch.device)]
        device = next((value for value in placed if not isinstance(value, bool)), None)
        dtype = next((value for value in (*args, kwargs.get("dtype")) if isinstance(value, torch.dtype)), None)
    options: dict[str, Any] = {"dtype": dtype, "copy": copy}
    if kwargs.get("memory_format") is not None:
        options["memory_format"] = kwargs["memory_format"]
    if device is None or (_on_gpu(device) and isinstance(tensor, _OnGpu)):
        return _torch_to(tensor, **options)
    if not _on_gpu(device):
        return _torch_to(tensor, torch.device(device), **options)
    _costs.uploads += 1
    uploaded: Tensor = _Upload.apply(_torch_to(tensor, **options))  # type: ignore[no-untyped-call]
    return uploaded


_torch_to = Tensor.to


class _Upload(torch.autograd.Function):
    """A copy to the GPU, with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _OnGpu(x.detach().clone())

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad.inner


class _OfTheEngine(TorchDispatchMode):
    """The zeros that autograd makes for outputs without a gradient, on "meta", lie on the pretended GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") == torch.device("meta"):
            return _OnGpu(func(*tree_map(_inner, args), **{**kwargs, "device": torch.device("cpu")}))
        return func(*args, **kwargs)


@contextmanager
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Costs]:
    """Have a pretended GPU in the block, in all threads of this process, and count what it does."""
    start = threading.Thread.run

    def run(thread: threading.Thread) -> None:
        with _OfTheEngine():  # modes are a thread's own
            start(thread)

    global _costs
    _costs = Costs()
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="CUDA is not available")  # autocast says it
        patch.setattr(threading.Thread, "run", run)
        patch.setattr(Tensor, "to", _to)
        patch.setattr(Tensor, "cuda", lambda tensor, *_, **__: _to(tensor, GPU))
        patch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
        # Where torch is told that there is a GPU, it asks the driver: a run's check of `device` alone is told.
        patch.setattr(torch.cuda, "is_available", lambda: sys._getframe(1).f_globals["__name__"] == setup.__name__)
        patch.setattr(torch.cuda, "device_count", lambda: int(sys._getframe(1).f_globals["__name__"] == setup.__name__))
        patch.setattr(torch, "inference_mode", torch.no_grad)  # wrapped tensors have no views in inference mode
        for name in _FACTORIES.split():
            patch.setattr(torch, name, _factory(getattr(torch, name)))
        with _OfTheEngine():
            yield _costs
