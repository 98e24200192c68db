"""TorchClient, called directly, and its refusals."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from fedbn_flwr.client import TorchClient
from fedbn_flwr.client.answers import answer_query
from fedbn_flwr.errors import ConfigError, DataError, FedBNError, StateError
from fedbn_flwr.messages.protocol import Continuity
from fedbn_flwr.messages.records import to_state
from fedbn_flwr.strategies import FedAvg
from fedbn_flwr.training import LearningRate, LocalTraining
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.loaded import (
    LoadedBatches,
    batches_of,
    first_batch,
    num_examples,
)
from tests.support.points import Points
from tests.support.seeds import with_seed
from tests.support.user_loops import loop_of_steps

SETTINGS = LocalTraining(
    learning_rate=LearningRate(0.1, (1,), (0.5,)), batch_size=4, sgd_momentum=0.9
)
TRACKED = ("running_mean", "running_var", "num_batches_tracked")
BN = [f"1.{leaf}" for leaf in ("weight", "bias", *TRACKED)]
FIRST = {"server-round": 1}


def local(*names: str) -> dict:
    return {"fedbn-flwr.local-entries": json.dumps(names), **FIRST}


@pytest.fixture
def make(points, mlp) -> Callable[..., TorchClient]:
    """``make(model=..., train=..., test=..., ...)`` makes a client of partition 3."""

    def made(**given) -> TorchClient:
        node = given.pop("node", {"partition-id": 3, "num-partitions": 5})
        context = Context(
            1, given.pop("node_id", 2), node, RecordDict(), given.pop("run", {})
        )
        return TorchClient(
            given.pop("model", mlp(dropout=0.2)),
            given.pop("train", points(10, 1)),
            given.pop("test", points(6, 2)),
            given.pop("settings", SETTINGS),
            context=context,
            **given,
        )

    return made


@pytest.fixture
def client(make) -> TorchClient:
    return make(seed=5)


def arrays(model: nn.Module) -> list[np.ndarray]:
    return [array.copy() for array in to_state(model.state_dict()).values()]


def fitted(client: TorchClient, **config: Any) -> list[np.ndarray]:
    """Return the arrays of a first round."""
    return client.fit(client.get_parameters({}), FIRST | config)[0]


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_seed_is_the_strategys_unless_the_client_has_one(make) -> None:
    def trained(of_client: int | None, of_strategy: int) -> list[np.ndarray]:
        torch.manual_seed(0)
        return fitted(make(seed=of_client), **{"fedbn-flwr.seed": of_strategy})

    for seed in (7, 0):
        assert same(trained(None, seed), trained(seed, 3))
        assert same(trained(seed, 1), trained(seed, 2))
    assert not same(trained(None, 1), trained(None, 2))


def test_clients_without_a_partition_id_draw_from_streams_of_their_own(make) -> None:
    """The stream of such a client depends on its node id, and of others does not.

    Once, all such clients had one stream, so equal data gave equal batches and dropout.
    """

    def trained(node_id: int, **named: int) -> list[np.ndarray]:
        return fitted(make(seed=5, node=named, node_id=node_id))

    assert same(trained(2**63 + 1), trained(2**63 + 1))
    assert not same(trained(2**63 + 1), trained(7))
    for partition in (0, 1):
        named = {"partition-id": partition}
        assert same(trained(5, **named), trained(7, **named))


def test_the_round_decides_which_batches_are_drawn(client) -> None:
    """Flower's projects use an underscore."""
    start = client.get_parameters({})
    first = client.fit(start, {"server_round": 1})[0]
    assert not same(first, client.fit(start, {"server-round": 2})[0])
    assert same(first, client.fit(start, FIRST)[0])


@pytest.mark.parametrize("where", ["argument", "node", "run"])
def test_the_state_folder_is_that_of_the_argument_or_of_the_configs(
    make, tmp_path, where: str
) -> None:
    given = {"node": {"partition-id": 3}}
    if where == "argument":
        given["state_dir"] = tmp_path
    else:
        given.setdefault(where, {})["state-dir"] = str(tmp_path)
    fitted(make(**given), **local(*BN), **Continuity("run-1").write())
    (file,) = (tmp_path / "run-1/partition-3").iterdir()
    assert file.suffix == ".safetensors"


def pairs(data: Points) -> TensorDataset:
    return TensorDataset(data.inputs, data.targets)


@pytest.mark.parametrize("size", [3, 10, 12])
def test_a_loop_of_ones_own_says_of_its_first_batch_what_a_torch_client_says(
    make, points, size: int
) -> None:
    data = points(10)
    settings = dataclasses.replace(SETTINGS, batch_size=size)
    client = make(train=data, settings=settings)
    query = Message(RecordDict(), dst_node_id=1, message_type="query")
    reply = answer_query(query, client.context, DataLoader(pairs(data), size))
    known = {"num-examples": 10, "batch-size": min(size, 10)}
    named = {"partition-id": 3, **known}
    assert client.get_properties({}) == named
    assert {**reply.content["metrics"]} == {**named, "num-partitions": 5}
    assert make(train=data, settings=settings, node={}).get_properties({}) == known


@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor])
def test_a_sampler_chooses_the_examples_of_a_pass(form) -> None:
    """Otherwise, statistics would include examples of others or of validation."""
    data = TensorDataset(torch.arange(10.0), torch.zeros(10))
    chosen = SubsetRandomSampler(form([7, 2, 5]))
    in_order = BatchSampler(chosen, 2, drop_last=False)
    for loader in (
        DataLoader(data, 2, sampler=chosen),
        DataLoader(data, batch_sampler=in_order),
    ):
        found = LoadedBatches(loader)
        assert (len(found), found.batch_size) == (3, 2)
        assert (num_examples(loader), first_batch(loader)) == (3, 2)
        assert found.batch(torch.arange(3))[0].tolist() == [2.0, 5.0, 7.0]
    parts = [DistributedSampler(data, 2, rank, shuffle=False) for rank in (0, 1)]
    assert [num_examples(DataLoader(data, 2, sampler=part)) for part in parts] == [5, 5]
    assert num_examples(DataLoader(data, 2, shuffle=True)) == 10
    assert num_examples(DataLoader(Endless())) == 3, "torch gives it another sampler"


def test_arrays_returned_by_fit_do_not_change_later(client) -> None:
    """The caller's input arrays do not change either."""
    start = client.get_parameters({})
    before = copy.deepcopy(start)
    first = client.fit(start, FIRST)[0]
    copies = copy.deepcopy(first)
    client.fit(first, {"server-round": 2})
    assert same(first, copies)
    assert same(start, before)


@pytest.mark.parametrize("error", [-1e-6, 0.0, 1e-6])
def test_a_counter_that_is_a_float_average_is_rounded(client, error: float) -> None:
    start = client.get_parameters({})
    start[6] = np.asarray(9 + error)  # 1.num_batches_tracked
    counter = client.fit(start, FIRST)[0][6]
    assert counter == 9 + 3  # ten examples in batches of four


def test_evaluate_with_named_test_sets(make, points, mlp) -> None:
    tests = {"own": points(6, 2), "global": points(8, 3), "none": points(0)}
    client = make(model=mlp(), test=tests)
    own, union = evaluate(mlp(), tests["own"]), evaluate(mlp(), tests["global"])
    loss, num_examples, metrics = client.evaluate(arrays(mlp()), {})
    assert (loss, num_examples) == (own.loss, 6)
    assert metrics["own-accuracy"] == own.metrics["accuracy"]
    assert (metrics["global-loss"], metrics["global-num-examples"]) == (union.loss, 8)
    asked = {"test-sets": "none,global"}
    loss, num_examples, metrics = client.evaluate(arrays(mlp()), asked)
    assert (loss, num_examples) == (union.loss, 8)
    assert [name for name in metrics if "global" not in name] == ["none-num-examples"]


def divides(model: nn.Module, batches: Any, rules: Any, learning_rate: float) -> float:
    """Return a mean over no batches."""
    return 1 / len([*batches])


@pytest.mark.parametrize("loop", [None, divides])
def test_a_client_with_one_example_cannot_train_but_tests_its_model(
    loop, make, points, mlp
) -> None:
    settings = LocalTraining(learning_rate=LearningRate(0.1), batch_size=4, loop=loop)
    client = make(model=mlp(), train=points(1), settings=settings)
    with pytest.raises(DataError, match="this client has one training example"):
        fitted(client)
    tuned = {"fedbn-flwr.fine-tune": 2, **FIRST}
    found = client.evaluate(arrays(mlp()), tuned)
    assert found == client.evaluate(arrays(mlp()), FIRST)


class Counted(nn.Linear):
    """A layer that stores any extra state."""

    kept = torch.tensor(3)

    def get_extra_state(self):
        return self.kept

    def set_extra_state(self, state) -> None:
        self.kept = state


def counted(mlp, kept) -> nn.Module:
    model = nn.Sequential(mlp(), Counted(3, 3).double())
    model[1].kept = kept
    return model


def test_an_extra_state_that_is_a_tensor_travels(make, mlp) -> None:
    model = counted(mlp, torch.tensor(3))
    start = [*arrays(model)[:-1], np.array(7)]
    assert make(model=model).fit(start, FIRST)[0][-1] == 7
    assert int(model[1].kept) == 3, "a copy is trained"


def untracked() -> nn.Module:
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), norm).double()


# Refused arguments.
class Endless(IterableDataset):
    def __len__(self) -> int:
        return 3

    def __iter__(self):
        return iter(())


Use = Callable


def of(data) -> Use:
    """Return a use of a client with this training data."""
    return lambda make, points, mlp: fitted(make(train=data))


def with_test_set(data) -> Use:
    return lambda make, points, mlp: make(test={"a": points(2), "b": data})


def loaded(**sampler) -> Use:
    data = TensorDataset(torch.arange(10.0), torch.zeros(10))
    return lambda make, points, mlp: LoadedBatches(DataLoader(data, **sampler))


class Balanced(BatchSampler):
    """A batch sampler that takes some examples twice, and others never."""

    def __iter__(self) -> Any:
        return iter([[0, 1], [0, 2]])


def plain_beside(trained, plain) -> Use:
    return lambda make, points, mlp: batches_of(
        DataLoader(trained(points)), plain(points)
    )


def ten(points) -> TensorDataset:
    return pairs(points(10))


def fit_with(change=lambda start: start, **config) -> Use:
    """Return a use that changes the received arrays and the config."""
    return lambda make, points, mlp: make(model=mlp()).fit(
        change(arrays(mlp())), config or FIRST
    )


def keeps(kept) -> Use:
    return lambda make, points, mlp: fitted(make(model=lambda: counted(mlp, kept)))


NAMES = ["0.weight", "0.bias", *BN, "fc.4.weight", "3.bias"]
NO_ROUND = (
    r"no 'server-round', .* on_fit_config_fn=lambda server_round: {'server-round':"
    r" server_round}$"
)
UNNAMED = "no test set 'global'; it has a set without a name"
REFUSED = [
    (of(Endless()), DataError, "Endless"),
    (of(DataLoader(TensorDataset(torch.ones(2, 5)), 7)), DataError, "DataLoader"),
    (with_test_set(iter(())), DataError, "iterator"),
    (of([{"image": torch.ones(5), "label": 1}] * 4), DataError, "dict of image, label"),
    (of([(torch.ones(5), 1, 0)] * 4), DataError, "batches_of"),
    (
        loaded(sampler=WeightedRandomSampler([1.0] * 10, 4)),
        DataError,
        "sampler, WeightedRandomSampler",
    ),
    (
        loaded(sampler=RandomSampler(range(10), num_samples=4)),
        DataError,
        "sampler, RandomSampler",
    ),
    (loaded(batch_sampler=[[7, 2], [5]]), DataError, "sampler, list"),
    (
        loaded(batch_sampler=Balanced(SequentialSampler(range(10)), 2, False)),
        DataError,
        "sampler, Balanced.* under FedTAN, its batch_size",
    ),
    (plain_beside(ten, lambda points: pairs(points(9))), DataError, "has 9 examples"),
    (plain_beside(lambda points: points(10), ten), DataError, "Points"),
    (plain_beside(ten, lambda points: Endless()), DataError, "Endless"),
    (plain_beside(ten, lambda points: points(10)), DataError, "Points"),
    (plain_beside(ten, lambda points: DataLoader(ten(points))), DataError, "Loader"),
    (
        lambda make, points, mlp: make(model=mlp().bfloat16()).fit([], FIRST),
        ConfigError,
        r"bfloat16.* torch\.autocast",
    ),
    (fit_with(lambda start: start[:-1]), StateError, "8 arrays for 9 entries"),
    (
        fit_with(lambda start: [start[0].T, *start[1:]]),
        StateError,
        r"'0.weight' has shape \(5, 4\)",
    ),
    (
        fit_with(**FIRST, **{"fedbn-flwr.array-names": json.dumps(NAMES)}),
        StateError,
        "'fc.4.weight'",
    ),
    (fit_with(other=1), ConfigError, NO_ROUND),
    (keeps({"steps": 1}), ConfigError, r"'1\._extra_state' \("),
    (keeps(b"\0"), ConfigError, r"'1\._extra_state' \("),
    (keeps(None), ConfigError, r"'1\._extra_state' \("),
    (  # names do not reveal layer 2, so its gamma and beta would be averaged
        lambda make, points, mlp: fitted(make(model=untracked()), **local(*BN)),
        ConfigError,
        r"'2\.weight'",
    ),
    (
        lambda make, points, mlp: make().evaluate(
            arrays(mlp()), {"test-sets": "global"}
        ),
        ConfigError,
        UNNAMED,
    ),
    (  # before a test of the other set, which would fail on no arrays
        lambda make, points, mlp: make(test={"own": points(8)}).evaluate(
            [], {"test-sets": "own,global"}
        ),
        ConfigError,
        "no test set 'global'; it has own",
    ),
]


@pytest.mark.parametrize(("use", "kind", "said"), REFUSED)
def test_what_a_client_cannot_use_is_refused_by_name(
    use: Use, kind: type[FedBNError], said: str, make, points, mlp
) -> None:
    with pytest.raises(kind, match=said):
        use(make, points, mlp)


@with_seed()
def cnn() -> nn.Module:
    first = nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4), nn.ReLU()
    return nn.Sequential(*first, nn.Conv2d(4, 2, 1), nn.Flatten(), nn.Linear(8, 3))


def test_a_loop_gets_a_cnn_in_the_memory_format_in_which_it_was_built(
    federate, points
) -> None:
    """Loops and optimizers such as LBFGS view weights and gradients as vectors."""

    def loop(model: nn.Module, *given: Any) -> float:
        loss = loop_of_steps(model, *given)
        wanted = [p.stride() for p in cnn().parameters()]
        assert [p.stride() for p in model.parameters()] == wanted
        assert [p.grad.stride() for p in model.parameters()] == wanted
        return loss

    data = [points(8, i, (1, 3, 3)) for i in range(2)]
    for one in data:
        one.inputs = one.inputs.float()
    run = federate(FedAvg(), cnn, data, loop=loop, local_steps=1, rounds=1)
    assert run.strategy.reports[0].participants == [0, 1]


@pytest.mark.parametrize("kind", ["fit", "evaluate"])
def test_an_own_method_may_write_into_its_arrays(
    federate, datasets, mlp, same_bits, kind: str
) -> None:
    """It gets copies. No other client sees its values."""

    def write(client: TorchClient, parameters: Any, config: Any):
        result = getattr(TorchClient, kind)(client, parameters, config)
        for array in parameters:
            array[...] = 9
        return result

    plain, written = (
        federate(FedAvg(), mlp, datasets, client=type("Client", (TorchClient,), own))
        for own in ({}, {kind: write})
    )
    same_bits(written.state, plain.state)
    assert not written.strategy.reports[-1].rejected
    assert written.strategy.reports == plain.strategy.reports
