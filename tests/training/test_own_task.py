"""The functions of a user's task change only the loss and the metrics."""

from __future__ import annotations

import copy
import functools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fedbn_flwr import InProcessGrid, TorchClient, client_app
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.messages.records import to_record, to_state
from fedbn_flwr.strategies import FedAvg, FedBN, FedTAN, FixBN, Scaffold
from fedbn_flwr.training import (
    CLASSIFICATION,
    LearningRate,
    LocalTraining,
    OwnTask,
    batches_of,
    evaluate,
)
from fedbn_flwr.training.tasks import Score, higher_is_better, in_percent, quantity_of


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    return nn.Sequential(*layers).double()


def pairs(client: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(client)
    inputs = torch.randn(13 + 4 * client, 4, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 3, (len(inputs),), generator=generator)
    return TensorDataset(inputs + client, targets)


def loss(model: nn.Module, inputs: Any, targets: Any) -> Tensor:
    return F.cross_entropy(model(inputs), targets)


def share(model: nn.Module, batches: Any) -> dict[str, Tensor]:
    right = [(model(x).argmax(1) == y).double() for x, y in batches]
    return {"accuracy": torch.cat(right).mean()}


OWN = OwnTask(
    "mine", loss=loss, test=share, score="accuracy", higher_is_better=True, test_batch=4
)


def run(task: Any, strategy: Any, data: Any = pairs, model: Any = build) -> Any:
    steps = LocalTraining(learning_rate=LearningRate(0.1), batch_size=4, local_steps=3)

    def client(context: Any) -> TorchClient:
        number = int(context.node_config["partition-id"])
        own = data(number)
        made = model if model is build else functools.partial(model, number)
        return TorchClient(made, own, own, steps, context=context, task=task)

    with InProcessGrid(client_app(client), 2) as grid:
        state = to_record(to_state(build().state_dict()))
        return strategy.start(grid, state, num_rounds=2)


def bits(result: Any) -> list[bytes]:
    return [result.arrays[name].numpy().tobytes() for name in result.arrays]


METHODS = {
    "fedavg": FedAvg,
    "fedbn": FedBN,
    "fixbn": lambda: FixBN(freeze_at=1),
    "fedtan": FedTAN,
    "scaffold": Scaffold,
    "recalibrated": lambda: FedBN(recalibrate=True),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_task_of_the_package_as_a_users_task_has_equal_bits(name: str) -> None:
    mine, packages = (run(task, METHODS[name]()) for task in (OWN, CLASSIFICATION))
    assert bits(mine) == bits(packages)
    for name in ("loss", "accuracy"):
        found = [one.evaluate_metrics_clientapp[2][name] for one in (mine, packages)]
        assert found[0] == pytest.approx(found[1], abs=1e-12)


class TwoViews(torch.utils.data.Dataset[Any]):
    def __init__(self, client: int) -> None:
        self.x = pairs(client).tensors[0]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, at: int) -> Any:
        return [{"a": self.x[at], "b": self.x[at] + 1}], (at, "text")


def apart(model: nn.Module, inputs: Any, targets: Any) -> Tensor:
    assert targets[1][0] == "text"
    return (model(inputs[0]["a"]) - model(inputs[0]["b"])).square().mean()


def test_structures_train_like_plain_torch() -> None:
    def views(client: int) -> Any:
        return batches_of(DataLoader(TwoViews(client)))

    task = OwnTask("views", loss=apart)
    trained = run(task, FedBN(recalibrate=True), views)
    assert trained.evaluate_metrics_clientapp[2]["loss"] > 0
    client = TorchClient(
        build(),
        views(0),
        views(0),
        LocalTraining(learning_rate=LearningRate(0.1), batch_size=0, local_steps=1),
        partition_id=0,
        task=task,
    )
    state = [entry.numpy().copy() for entry in build().state_dict().values()]
    returned, _, _ = client.fit(state, {"server-round": 1})
    model = build().train()
    x = TwoViews(0).x
    apart(model, [{"a": x, "b": x + 1}], (0, ["text"])).backward()
    for parameter, array in zip(model[0].parameters(), returned, strict=False):
        assert torch.equal(parameter - 0.1 * parameter.grad, torch.from_numpy(array))


class Detector(nn.Module):
    """Returns losses in train mode, and predictions in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.net = build()

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Any:
        outputs = self.net(inputs)
        if self.training:
            return {"loss": F.cross_entropy(outputs, targets)}
        return list(outputs)


def test_the_loss_of_a_detector_is_tested_with_layers_in_eval_mode() -> None:
    def of_detector(model: nn.Module, inputs: Any, targets: Any) -> Any:
        return sum(model(inputs, targets).values())

    model = Detector().eval()
    before = copy.deepcopy(model.state_dict())
    task, data = OwnTask("boxes", loss=of_detector), batches_of(DataLoader(pairs(0)))
    with pytest.raises(ConfigError, match="loss_in_train_mode=True"):
        evaluate(model, data, task=task)
    found = evaluate(model, data, task=replace(task, loss_in_train_mode=True))
    assert found.loss == pytest.approx(evaluate(model.net, data, task=OWN).loss)
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_random_numbers_of_a_test_are_equal_in_every_test() -> None:
    def noisy(model: nn.Module, inputs: Any, targets: Any) -> Tensor:
        return loss(model, inputs + torch.randn_like(inputs), targets)

    task = OwnTask("noisy", loss=noisy, test=lambda model, _: {"r": torch.rand(())})
    data = batches_of(DataLoader(pairs(0)))
    model = build()
    first = evaluate(model, data, task=task)
    torch.rand(3)
    assert evaluate(model, data, task=task) == first


@pytest.mark.parametrize(("passes", "reads"), [(0, 4), (0.5, 4), (1, 4), (2, 8)])
def test_a_test_reads_the_data_once_and_each_further_pass_again(
    passes: float, reads: int
) -> None:
    """The loss is over all batches, and sees each as the test does."""
    data, read = pairs(0), []

    class Counted:
        def __len__(self) -> int:
            return len(data)

        def batch(self, positions: Tensor, generator: Any = None) -> Any:
            read.append(len(positions))
            return data.tensors[0][positions], data.tensors[1][positions]

    def counts(model: nn.Module, batches: Any) -> dict[str, float]:
        if passes == 0.5:
            next(iter(batches))
        seen = [x.clone() for _ in range(int(passes)) for x, _ in batches]
        assert not seen or torch.equal(torch.cat(seen[:4]), data.tensors[0])
        return {"accuracy": len(seen)}

    def in_place(model: nn.Module, inputs: Any, targets: Any) -> Tensor:
        return loss(model, inputs.mul_(2), targets)

    found = evaluate(build(), Counted(), task=replace(OWN, loss=in_place, test=counts))
    assert len(read) == reads
    assert found.metrics == {"accuracy": 4 * int(passes)}
    doubled = TensorDataset(2 * data.tensors[0], data.tensors[1])
    alone = replace(OWN, test=None, score="loss")
    wanted = evaluate(build(), batches_of(DataLoader(doubled)), task=alone)
    assert found.loss == wanted.loss


def test_a_site_that_does_not_define_a_metric_does_not_count() -> None:
    def defined(model: nn.Module, batches: Any) -> dict[str, float]:
        size = sum(len(x) for x, _ in batches)
        return {"c-index": float("nan") if size == 13 else 0.5}

    found = run(replace(OWN, test=defined, score="c-index"), FedAvg())
    assert found.evaluate_metrics_clientapp[2]["c-index"] == 0.5


OTHER = build()
REFUSED: dict[str, Any] = {
    "a mean": (lambda m, x, y: F.cross_entropy(m(x), y, reduction="none"), ConfigError),
    "a tensor": (lambda m, x, y: 1.0, ConfigError),
    "a real number": (lambda m, x, y: loss(m, x, y) * 1j, ConfigError),
    "no gradient": (lambda m, x, y: loss(m, x, y).detach(), ConfigError),
    "not in the model": (lambda m, x, y: loss(OTHER, x, y), ConfigError),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_loss_that_cannot_train_is_refused(why: str) -> None:
    function, error = REFUSED[why]
    client = TorchClient(
        build, pairs(0), pairs(0), LocalTraining(learning_rate=LearningRate(0.1)),
        partition_id=0, task=OwnTask("bad", loss=function),
    )  # fmt: skip
    state = [entry.numpy() for entry in build().state_dict().values()]
    with pytest.raises(error, match="loss of task bad"):
        client.fit(state, {"server-round": 1})


@pytest.mark.parametrize(
    "returned",
    [
        0.5,
        None,
        {"x": torch.ones(2)},
        {"accuracy": torch.ones((), requires_grad=True)},
        {"accuracy": None},
        {"accuracy": 10**400},
        {"loss": 1.0, "accuracy": 1.0},
        {"num-examples": 1.0, "accuracy": 1.0},
        {"examples-tested": 1.0, "accuracy": 1.0},
        {"x": 1.0},
    ],
)
def test_metrics_that_are_not_numbers_by_name_are_refused(returned: Any) -> None:
    task = replace(OWN, test=lambda model, batches: returned)
    with pytest.raises(ConfigError, match="test= of task mine returned"):
        evaluate(build(), batches_of(DataLoader(pairs(0))), task=task)


@pytest.mark.parametrize("function", ["loss", "test"])
def test_an_exception_names_the_users_function_and_the_client(
    function: str, caplog: Any
) -> None:
    def fails(model: nn.Module, *rest: Any) -> Any:
        if model.client:
            raise KeyError("label")
        return getattr(OWN, function)(model, *rest)

    def task(model: nn.Module) -> OwnTask:
        return replace(OWN, **{function: fails})

    def named(client: int) -> nn.Module:
        model = build()
        model.client = client
        return model

    run(task, FedAvg(), model=named)
    told = rf"partition 1\).*: {function}= of task mine raised KeyError in line"
    assert re.search(told, caplog.text)
    with pytest.raises(ConfigError, match=f"{function}= of task mine raised KeyError"):
        run(task, FedAvg(), model=lambda _=1: named(1))


@pytest.mark.parametrize("given", [lambda outputs, y: 0.0, nn.MSELoss()])
def test_a_loss_of_outputs_and_targets_is_told_its_arguments(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"\(model, inputs, targets\)"):
        run(OwnTask("mine", loss=given), FedAvg())


def test_other_names_of_metrics_are_refused(caplog: Any) -> None:
    def other(model: nn.Module, batches: Any) -> dict[str, float]:
        size = sum(len(x) for x, _ in batches)
        return {"accuracy": 1.0, f"of-{size}": 1.0}

    run(replace(OWN, test=other), FedAvg())
    told = r"partition 1\).*: test= of task mine returned accuracy, of-17, but accuracy"
    assert re.search(told, caplog.text)


def test_two_scores_of_one_name_keep_their_own_facts() -> None:
    low, high = (
        replace(OWN, higher_is_better=better, share=better) for better in (False, True)
    )
    for task, better in ((low, False), (high, True), (copy.deepcopy(low), False)):
        assert task.score == task.metrics[0] == quantity_of(task.score) == "accuracy"
        assert higher_is_better(task.score) is task.higher_is_better is better
        assert in_percent(task.score) is better
        assert higher_is_better(Score.after("test", task.score)) is better
        assert task.scored_by("loss").higher_is_better is False
        with pytest.raises(ConfigError, match="metrics=f1"):
            task.measuring(["f1"])
    assert higher_is_better("accuracy")
    assert in_percent("accuracy")


def test_a_task_needs_its_own_name_and_a_test_for_its_score() -> None:
    with pytest.raises(ConfigError, match="a name of its own"):
        OwnTask("regression", loss=loss)
    with pytest.raises(ConfigError, match="needs test="):
        OwnTask("mine", loss=loss, score="c-index")
    with pytest.raises(ConfigError, match="higher_is_better=True or False"):
        OwnTask("mine", loss=loss, test=share, score="c-index")


CALLS: list[tuple[int, int]] = []


class Numbered:
    """A loss that counts its calls."""

    count = 0

    def __call__(self, model: nn.Module, inputs: Any, targets: Any) -> Tensor:
        self.count += 1
        CALLS.append((len(inputs), self.count))
        return loss(model, inputs, targets)


@pytest.mark.parametrize("of_model", [False, True])
def test_the_loss_of_a_trial_is_not_the_loss_of_the_training(of_model: bool) -> None:
    def wide() -> nn.Module:
        # This BatchNorm takes one example.
        layers = (nn.Unflatten(1, (2, 2)), nn.BatchNorm1d(2), nn.Flatten())
        return nn.Sequential(*layers, nn.Linear(4, 3)).double()

    CALLS.clear()
    task = OwnTask("counts", loss=Numbered())
    client = TorchClient(
        wide,
        pairs(0),
        pairs(0),
        LocalTraining(learning_rate=LearningRate(0.1), batch_size=4, local_epochs=1),
        partition_id=0,
        task=(lambda _: OwnTask("counts", loss=Numbered())) if of_model else task,
    )
    client.fit(
        [one.numpy() for one in wide().state_dict().values()], {"server-round": 1}
    )
    tried = (1, 1) if of_model else (1, 4)
    assert [(4, 1), (4, 2), (4, 3), tried, (1, 4)] == CALLS


def test_only_training_steps_move_the_state_of_a_loss() -> None:
    task, data = OwnTask("counts", loss=Numbered()), pairs(1)
    steps = LocalTraining(learning_rate=LearningRate(0.1), local_steps=3)
    client = TorchClient(build, data, data, steps, partition_id=0, task=task)
    state = [one.numpy() for one in build().state_dict().values()]
    for server_round in (1, 2):
        client.fit(state, {"server-round": server_round})
        client.evaluate(state, {"server-round": server_round})
        client.statistics(state, {"server-round": server_round})
        assert task.loss.count == 3 * server_round
