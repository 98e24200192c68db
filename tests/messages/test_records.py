"""State dicts survive the trip through Flower's records."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torchvision.models as tv
from flwr.app import Array, ArrayRecord

from fedbn_flwr.errors import StateError
from fedbn_flwr.messages.records import from_record, num_bytes, tensors, to_record, to_state

STATE = {
    "z": torch.tensor([[1.5, float("nan")], [-0.0, float("inf")]]),
    "counter": torch.tensor(2**53 + 1),
    "scalar": torch.tensor(0.1, dtype=torch.float64),
    "double": torch.full((2, 0, 3), 1.0, dtype=torch.float64),
    "half": torch.tensor([1e-7, 65504.0], dtype=torch.float16),
    "flag": torch.tensor([True, False]),
    "a": torch.arange(4, dtype=torch.int64),
}


def through_flower(record: ArrayRecord) -> ArrayRecord:
    """Rebuild every array from its bytes, as a network does."""
    return ArrayRecord({k: Array(v.dtype, v.shape, v.stype, bytes(v.data)) for k, v in record.items()})


def test_tensors_come_back_bit_for_bit() -> None:
    back = tensors(from_record(through_flower(to_record(STATE))))
    assert list(back) == list(STATE)
    for name, tensor in STATE.items():
        assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape)
        assert back[name].numpy().tobytes() == tensor.numpy().tobytes(), name


def test_arrays_and_tensors_give_the_same_record() -> None:
    record = to_record(to_state(STATE))
    assert [a.data for a in record.values()] == [a.data for a in to_record(STATE).values()]


def test_a_torchvision_model_loads_back() -> None:
    model = tv.mobilenet_v2()
    copy = tv.mobilenet_v2()
    copy.load_state_dict(tensors(from_record(to_record(model.state_dict()))))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), copy.state_dict().values(), strict=True))


def test_strides_do_not_travel_but_values_do() -> None:
    image = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    last = image.contiguous(memory_format=torch.channels_last)
    transposed = torch.arange(6.0).reshape(2, 3).t()
    back = from_record(to_record({"w": last, "t": transposed}))
    assert np.array_equal(back["w"], image.numpy())
    assert back["w"].flags.c_contiguous
    assert np.array_equal(back["t"], transposed.numpy())


def test_parameters_that_need_gradients_are_written() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    assert not tensors(from_record(to_record({"p": parameter})))["p"].requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_dtypes_that_flower_cannot_send_are_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(StateError) as error:
        to_record({"fine": torch.zeros(1), "layer.weight": torch.zeros(2).to(dtype)})
    assert str(error.value) == (
        f"entry 'layer.weight' is {dtype}, which Flower's records cannot carry. Keep the model's state in float32 "
        "(mixed precision goes through autocast, amp=true)."
    )


def test_reading_gives_fresh_memory() -> None:
    record = to_record({"x": torch.zeros(2)})
    from_record(record)["x"][:] = 7
    assert np.array_equal(from_record(record)["x"], [0, 0])


def test_bytes_of_floats_and_of_other_entries_are_counted_apart() -> None:
    assert num_bytes(to_record(STATE)) == (4 * 4 + 8 + 0 + 2 * 2, 8 + 2 + 4 * 8)
    assert num_bytes(ArrayRecord()) == (0, 0)
