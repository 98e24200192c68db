"""TorchClient, called directly."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from fedbn_flwr.client import TorchClient
from fedbn_flwr.client.answers import answer_query
from fedbn_flwr.client.client_data import as_batches
from fedbn_flwr.errors import ConfigError, DataError, StateError
from fedbn_flwr.messages.protocol import Continuity, NodeProperties
from fedbn_flwr.messages.records import to_record, to_state
from fedbn_flwr.training import LearningRate, LocalTraining
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.loaded import (
    LoadedBatches,
    batches_of,
    first_batch,
    num_examples,
)

SETTINGS = LocalTraining(
    learning_rate=LearningRate(0.1, (1,), (0.5,)), batch_size=4, sgd_momentum=0.9
)
BN = json.dumps(
    [
        f"1.{leaf}"
        for leaf in (
            "weight",
            "bias",
            "running_mean",
            "running_var",
            "num_batches_tracked",
        )
    ]
)


def context(partition_id: int = 3) -> Context:
    return Context(
        1, 2, {"partition-id": partition_id, "num-partitions": 5}, RecordDict(), {}
    )


@pytest.fixture
def client(points, mlp) -> TorchClient:
    return TorchClient(
        mlp(dropout=0.2),
        points(10, 1),
        points(6, 2),
        SETTINGS,
        context=context(),
        seed=5,
    )


def arrays(model: nn.Module) -> list[np.ndarray]:
    return [array.copy() for array in to_state(model.state_dict()).values()]


class Viewed(nn.Sequential):
    """A network whose ``view`` requires images one after another in memory."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4 * 6 * 6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[2](self[1](self[0](x)).view(-1, 4 * 6 * 6))


class Noised(Dataset):
    """Images with a random transform."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.rand(3, 8, 8), index % 3


@pytest.mark.parametrize("given", ["a model", "a function"])
def test_a_model_that_views_its_memory_trains_by_default(given: str, caplog) -> None:
    own = Viewed if given == "a function" else Viewed()
    tested = TensorDataset(torch.rand(3, 3, 8, 8), torch.arange(3))
    client = TorchClient(own, Noised(), tested, SETTINGS, context=context())
    assert client.fit(arrays(Viewed()), {"server-round": 1})[2]["steps"] == 2
    assert client.evaluate(arrays(Viewed()), {})[1] == 3
    assert not caplog.records


def test_the_seed_is_the_strategys_unless_the_client_has_one(
    points, mlp, same_bits
) -> None:
    def trained(of_client: int | None, of_strategy: int) -> dict[int, np.ndarray]:
        torch.manual_seed(0)
        own = TorchClient(
            mlp(dropout=0.5),
            points(10, 1),
            points(6, 2),
            SETTINGS,
            context=context(),
            seed=of_client,
        )
        return dict(
            enumerate(
                own.fit(
                    own.get_parameters({}),
                    {"server-round": 1, "fedbn-flwr.seed": of_strategy},
                )[0]
            )
        )

    for seed in (7, 0):
        same_bits(trained(None, seed), trained(seed, 3))
        same_bits(trained(seed, 1), trained(seed, 2))
    assert not np.array_equal(trained(None, 1)[0], trained(None, 2)[0])


@pytest.mark.parametrize("where", ["the argument", "the node config", "the run config"])
def test_the_state_folder_is_that_of_the_argument_or_of_the_configs(
    points, mlp, tmp_path, where
) -> None:
    named = {"state-dir": str(tmp_path / where)}
    node = {"partition-id": 3, **(named if where == "the node config" else {})}
    flower = Context(
        1, 2, node, RecordDict(), named if where == "the run config" else {}
    )
    argument = tmp_path / where if where == "the argument" else None
    own = TorchClient(
        mlp(), points(10, 1), points(6, 2), SETTINGS, context=flower, state_dir=argument
    )
    config = {
        "fedbn-flwr.local-entries": BN,
        "server-round": 1,
        **Continuity("run-1").write(),
    }
    own.fit(own.get_parameters({}), config)
    assert [
        path.suffix for path in (tmp_path / where / "run-1/partition-3").iterdir()
    ] == [".safetensors"]


def test_get_properties_returns_partition_size_and_batch_size(
    client, points, mlp
) -> None:
    assert client.get_properties({}) == {
        "partition-id": 3,
        "num-examples": 10,
        "batch-size": 4,
    }
    assert TorchClient(mlp(), points(4), points(1), SETTINGS).get_properties({}) == {
        "num-examples": 4,
        "batch-size": 4,
    }
    named = TorchClient(
        mlp(), points(4), points(1), SETTINGS, context=context(), partition_id=1
    )
    assert named.get_properties({}) == {
        "partition-id": 1,
        "num-examples": 4,
        "batch-size": 4,
    }


@pytest.mark.parametrize("size", [3, 10, 12])
def test_a_loop_of_ones_own_says_of_its_first_batch_what_a_torch_client_says(
    points, mlp, size: int
) -> None:
    data = points(10)
    settings = dataclasses.replace(SETTINGS, batch_size=size)
    client = TorchClient(mlp(), data, points(1), settings, context=context())
    loader = DataLoader(pairs(data), size)
    query = Message(RecordDict(), dst_node_id=1, message_type="query")
    said = NodeProperties.read(answer_query(query, context(), loader))
    assert {
        "partition-id": said.partition_id,
        "num-examples": said.num_examples,
        "batch-size": said.batch_size,
    } == client.get_properties({})


def pairs(data) -> TensorDataset:
    return TensorDataset(data.inputs, data.targets)


class Transformed(Dataset):
    """Examples with noise of torch, NumPy and Python.

    Its ``batch`` is unrelated to the method of ``Batches``.
    """

    def __init__(self, data) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, number: int):
        drawn = torch.rand(()).item() + np.random.rand() + random.random()
        return self.data.inputs[number] + drawn, int(self.data.targets[number])

    def batch(self, batch_size: int) -> None:
        raise NotImplementedError


def test_random_transforms_draw_from_the_clients_stream(points) -> None:
    """The stream covers torch, NumPy and Python.

    Other draws do not change, and tests may draw as well.
    """
    data, positions = as_batches(Transformed(points(10, 1))), torch.arange(4)
    before, generator = torch.get_rng_state(), torch.Generator().manual_seed(1)
    first = data.batch(positions, generator)[0]
    second = data.batch(positions, generator)[0]
    assert torch.equal(torch.get_rng_state(), before)
    again = data.batch(positions, torch.Generator().manual_seed(1))[0]
    assert torch.equal(again, first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor])
def test_a_sampler_chooses_the_examples_of_a_pass(form: Any) -> None:
    """Otherwise, statistics would include examples of others or of validation."""
    data = TensorDataset(torch.arange(10.0), torch.zeros(10))
    chosen = SubsetRandomSampler(form([7, 2, 5]))
    in_order = BatchSampler(chosen, 2, drop_last=False)
    for loader in (
        DataLoader(data, 2, sampler=chosen),
        DataLoader(data, batch_sampler=in_order),
    ):
        found = LoadedBatches(loader)
        assert (
            len(found),
            found.batch_size,
            num_examples(loader),
            first_batch(loader),
        ) == (3, 2, 3, 2)
        assert found.batch(torch.arange(3))[0].tolist() == [2.0, 5.0, 7.0]
    parts = [DistributedSampler(data, 2, rank, shuffle=False) for rank in (0, 1)]
    assert [num_examples(DataLoader(data, 2, sampler=part)) for part in parts] == [5, 5]
    assert num_examples(DataLoader(data, 2, shuffle=True)) == 10
    drawn = WeightedRandomSampler([1.0] * 10, 4), RandomSampler(data, num_samples=4)
    refused = [DataLoader(data, 2, sampler=sampler) for sampler in drawn]
    refused.append(DataLoader(data, batch_sampler=[[7, 2], [5]]))
    for name, loader in zip(
        ("WeightedRandomSampler", "RandomSampler", "list"), refused, strict=True
    ):
        with pytest.raises(DataError, match=f"sampler, {name}"):
            LoadedBatches(loader)


def test_plain_training_data_are_the_same_examples(points) -> None:
    ten = points(10)
    refused = [
        (pairs(ten), pairs(points(9))),
        (ten, pairs(ten)),
        (pairs(ten), Endless()),
        (pairs(ten), ten),
    ]
    refused.append((pairs(ten), DataLoader(pairs(ten), 1)))
    for trained, plain in refused:
        with pytest.raises(DataError):
            batches_of(DataLoader(trained), plain)


class Endless(IterableDataset):
    def __len__(self) -> int:
        return 3

    def __iter__(self):
        return iter(())


class Counted(nn.Linear):
    """A layer that stores any extra state."""

    kept: Any = None

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


@pytest.mark.parametrize(
    "kept", [{"steps": 1}, b"\0", None], ids=["dict", "bytes", "None"]
)
def test_entries_that_are_no_tensors_are_refused_by_name(
    kept: Any, points, mlp
) -> None:
    model = nn.Sequential(mlp(), Counted(3, 3).double())
    model[1].kept = kept
    with pytest.raises(ConfigError, match=r"'1\._extra_state' \("):
        TorchClient(lambda: model, points(10, 1), points(6, 2), SETTINGS).fit(
            [], {"server-round": 1}
        )
    with pytest.raises(StateError, match=r"'1\._extra_state'"):
        to_record(model.state_dict())


def test_an_extra_state_that_is_a_tensor_travels(points, mlp) -> None:
    model = nn.Sequential(mlp(), Counted(3, 3).double())
    model[1].kept = torch.tensor(3)
    got, _, _ = TorchClient(model, points(10, 1), points(6, 2), SETTINGS).fit(
        [*arrays(model)[:-1], np.array(7)], {"server-round": 1}
    )
    assert got[-1] == 7
    assert int(model[1].kept) == 3, "a copy is trained"


def test_switched_off_tracking_is_told_once(points, mlp, caplog) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(mlp(), nn.BatchNorm1d(3).double())
        model[1].track_running_stats = False
        return model

    for _ in range(2):
        TorchClient(build(), points(10, 1), points(6, 2), SETTINGS).fit(
            arrays(build()), {"server-round": 1}
        )
    assert (
        len(
            [
                record
                for record in caplog.records
                if "track_running_stats" in record.message
            ]
        )
        == 1
    )


def test_clients_without_a_partition_id_draw_from_streams_of_their_own(
    points, mlp
) -> None:
    """The stream of such a client depends on its node id, and of others does not.

    Once, all such clients had one stream, so equal data gave equal batches and dropout.
    """

    def trained(node_id: int, **named: int) -> list[np.ndarray]:
        alone = Context(1, node_id, named, RecordDict(), {})
        client = TorchClient(
            mlp(dropout=0.2),
            points(10, 1),
            points(6, 2),
            SETTINGS,
            context=alone,
            seed=5,
        )
        return client.fit(arrays(mlp(dropout=0.2)), {"server-round": 1})[0]

    def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
        return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))

    assert same(trained(2**63 + 1), trained(2**63 + 1))
    assert not same(trained(2**63 + 1), trained(7))
    for partition in (0, 1):
        named = {"partition-id": partition}
        assert same(trained(5, **named), trained(7, **named))


def test_arrays_returned_by_fit_do_not_change_later(client) -> None:
    """The caller's input arrays do not change either."""
    start = client.get_parameters({})
    before = [a.copy() for a in start]
    first, _, _ = client.fit(start, {"server-round": 1})
    copies = [a.copy() for a in first]
    client.fit(first, {"server-round": 2})
    for held, kept in ((first, copies), (start, before)):
        assert all(np.array_equal(a, b) for a, b in zip(held, kept, strict=True))


@pytest.mark.parametrize("error", [-1e-6, 0.0, 1e-6])
def test_a_counter_that_is_a_float_average_is_rounded(
    client, mlp, error: float
) -> None:
    place = [*mlp().state_dict()].index("1.num_batches_tracked")
    start = client.get_parameters({})
    start[place] = np.asarray(9 + error)
    counter = client.fit(start, {"server-round": 1})[0][place]
    assert counter == 9 + 3  # ten examples in batches of four


def test_evaluate_with_named_test_sets(points, mlp) -> None:
    tests = {"own": points(6, 2), "global": points(8, 3)}
    client = TorchClient(mlp(), points(4), tests, SETTINGS)
    own, union = evaluate(mlp(), tests["own"]), evaluate(mlp(), tests["global"])
    loss, num_examples, metrics = client.evaluate(arrays(mlp()), {})
    assert (loss, num_examples) == (own.loss, 6)
    assert metrics["own-accuracy"] == own.accuracy
    assert (metrics["global-loss"], metrics["global-num-examples"]) == (union.loss, 8)
    loss, num_examples, metrics = client.evaluate(
        arrays(mlp()), {"test-sets": "global"}
    )
    assert (loss, num_examples) == (union.loss, 8)
    assert "own-loss" not in metrics


def test_an_unknown_test_set_is_refused_before_the_others_are_tested(
    points, mlp, monkeypatch
) -> None:
    """The error once contained only ``'global'``."""
    monkeypatch.setattr("fedbn_flwr.client.torch_client.evaluate", None)
    for tests, known in (
        ({"own": points(8)}, "own"),
        (points(8), "a set without a name"),
    ):
        client = TorchClient(mlp(), points(20), tests, SETTINGS, context=context())
        with pytest.raises(ConfigError, match=f"no test set 'global'; it has {known}"):
            client.evaluate(
                arrays(mlp()),
                {"test-sets": "own,global" if known == "own" else "global"},
            )


def test_a_split_that_misses_a_batchnorm_without_running_statistics_is_refused(
    points,
) -> None:
    """Names do not reveal it, so its gamma and beta would be averaged."""
    model = nn.Sequential(
        nn.Linear(5, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False)
    ).double()
    own = TorchClient(model, points(9), points(3), SETTINGS, context=context())
    with pytest.raises(ConfigError, match=r"'2\.weight'"):
        own.fit(
            own.get_parameters({}), {"fedbn-flwr.local-entries": BN, "server-round": 1}
        )
    whole = json.dumps([*json.loads(BN), "2.weight", "2.bias"])
    assert (
        len(
            own.fit(
                own.get_parameters({}),
                {"fedbn-flwr.local-entries": whole, "server-round": 1},
            )[0]
        )
        == 2
    )


@pytest.mark.parametrize("key", ["server-round", "server_round"])
def test_the_round_decides_which_batches_are_drawn_and_is_needed(
    client, key: str
) -> None:
    """Legacy strategies send no round, and Flower's projects use an underscore."""
    start = client.get_parameters({})
    first = client.fit(start, {key: 1})[0][0]
    second = client.fit(start, {key: 2})[0][0]
    assert not np.array_equal(first, second)
    assert np.array_equal(first, client.fit(start, {"server-round": 1})[0][0])
    said = (
        r"no 'server-round', .* on_fit_config_fn=lambda server_round: {'server-round':"
        r" server_round}$"
    )
    with pytest.raises(ConfigError, match=said):
        client.fit(start, {})


def test_a_client_without_tests_of_its_own_does_the_others(points, mlp) -> None:
    client = TorchClient(
        mlp(),
        points(8),
        {"own": points(0), "global": points(6)},
        SETTINGS,
        context=context(),
    )
    loss, count, metrics = client.evaluate(client.get_parameters({}), {})
    assert metrics["own-num-examples"] == 0
    assert (count, loss) == (6, metrics["global-loss"])
    assert not any(
        name.startswith("own-") and name != "own-num-examples" for name in metrics
    )


@pytest.mark.parametrize(
    "data",
    [Endless(), DataLoader(TensorDataset(torch.ones(2, 5)), batch_size=7), iter(())],
    ids=["a stream", "a loader", "an iterator"],
)
def test_what_is_no_data_set_is_refused_by_its_type(data: Any, points, mlp) -> None:
    for given in ((data, points(2)), (points(2), {"a": points(2), "b": data})):
        with pytest.raises(DataError, match=type(data).__name__):
            TorchClient(mlp(), *given, SETTINGS)


@pytest.mark.parametrize(
    ("examples", "named"),
    [
        ([{"image": torch.ones(5), "label": 1}] * 4, "dict of image, label"),
        ([(torch.ones(5), 1, 0)] * 4, "batches_of"),
    ],
    ids=["dicts", "triples"],
)
def test_examples_that_are_no_pairs_of_one_shape_are_refused(
    examples: Any, named: str, points, mlp
) -> None:
    client = TorchClient(mlp(), examples, points(2), SETTINGS, context=context())
    with pytest.raises(DataError, match=named):
        client.fit(arrays(mlp()), {"server-round": 1})


def renamed(client: TorchClient, **names: str) -> dict[str, str]:
    """Return a config with the model's array names, some of them changed."""
    return {
        "fedbn-flwr.array-names": json.dumps(
            [names.get(name, name) for name in client.model.state_dict()]
        )
    }


@pytest.mark.parametrize(
    ("change", "config", "named"),
    [
        (lambda start: start[:-1], {}, "8 arrays for 9 entries"),
        (lambda start: [start[0].T, *start[1:]], {}, r"'0.weight' has shape \(5, 4\)"),
        (lambda start: start, {"4.weight": "fc.4.weight"}, "'fc.4.weight'"),
    ],
    ids=["one less", "another shape", "another name"],
)
def test_arrays_that_do_not_fit_the_model_are_refused(
    client, change: Any, config: Any, named: str
) -> None:
    start = client.get_parameters({})
    names = renamed(client, **config) if config else {}
    with pytest.raises(StateError, match=named):
        client.fit(change(start), {"server-round": 1, **names})
