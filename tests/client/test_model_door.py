"""Each message has a model that is built for it, or belongs to its client."""

from __future__ import annotations

import functools
import gc
import random
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import mse_loss
from torchvision.models import mnasnet0_5

from fedbn_flwr import InProcessGrid, client_app
from fedbn_flwr.client import TorchClient, model_door
from fedbn_flwr.client.model_door import Door
from fedbn_flwr.errors import ConfigError, NothingTrainedError, StateError
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.strategies import (
    HBN,
    Ditto,
    FedAvg,
    FedBN,
    FedTAN,
    Scaffold,
    combined,
)
from fedbn_flwr.training import CLASSIFICATION, REGRESSION, LearningRate, LocalTraining
from fedbn_flwr.training.freezing import stays_in_eval
from fedbn_flwr.training.model_state import load_state
from fedbn_flwr.training.run_memory import kept_for_run
from tests.support.federation import torch_clients


class Builds:
    """A function that builds a model, and counts its calls."""

    def __init__(self, make) -> None:
        self.make, self.count = make, 0

    def __call__(self) -> nn.Module:
        self.count += 1
        return self.make()


@pytest.fixture
def run(points):
    """``run(strategy, build, start, rounds)`` runs four clients with one ``build``."""
    settings = LocalTraining(
        learning_rate=LearningRate(0.1), local_steps=2, batch_size=4
    )
    datasets = [points(n, i) for i, n in enumerate((6, 13, 9, 21))]

    def do(
        strategy: Any, build: Any, start: nn.Module, rounds: int, **given: Any
    ) -> Any:
        app = client_app(torch_clients(lambda: build, datasets, settings, **given))
        with InProcessGrid(app, 4) as grid:
            arrays = to_record(start.state_dict())
            return strategy.start(grid, arrays, num_rounds=rounds)

    return do


@pytest.mark.parametrize("method", [FedBN, FedTAN])
def test_models_that_are_used_again_have_the_bits_of_new_ones(
    run, mlp, method, same_bits
) -> None:
    """They serve queries, trainings, exchanges and evaluations of four clients."""
    build, again = Builds(mlp), Builds(mlp)
    found = [
        run(method(), build, mlp(), 3),
        run(method(), again, mlp(), 3, reuse_model=True),
        *(
            [run(method(), mlp(), mlp(), 3, reuse_model=True)]
            if method is FedBN
            else []
        ),
    ]
    assert build.count > 4 * 3
    assert again.count == (1 if method is FedBN else 4), "one for each in the barrier"
    for one in found[1:]:
        same_bits(*(each.arrays.to_torch_state_dict() for each in (found[0], one)))


def test_the_message_that_freezes_a_model_frees_it(run, mlp) -> None:
    model = mlp()
    run(FedAvg(train_only="3.bias"), model, mlp(), 2, reuse_model=True)
    assert all(one.requires_grad for one in model.parameters())
    assert not stays_in_eval(model.train())


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("wrap", [lambda model: model, torch.compile])
def test_a_model_that_is_lent_again_has_no_gradients(mlp, wrap, reuse) -> None:
    """A loop that accumulates gradients would begin with another client's values."""
    lend = Door(lambda: wrap(mlp()), reuse=reuse).lend
    with lend() as cached:
        cached.plain(torch.ones(4, 5, dtype=torch.float64)).sum().backward()
        used = cached.model
    with lend() as cached:
        assert (cached.model is used) == (reuse or wrap is torch.compile)
        assert all(p.grad is None for p in cached.model.parameters())


@pytest.mark.parametrize(
    "wrap",
    [lambda model: model, lambda model: lambda: model],
    ids=["model", "function"],
)
@pytest.mark.parametrize(
    ("first", "name"), [(nn.Flatten(), "1.weight"), (nn.LazyConv2d(3, 3), "0.weight")]
)
def test_a_lazy_layer_that_has_seen_no_batch_is_refused_by_name(
    wrap, first: nn.Module, name: str
) -> None:
    """The model is given itself, or by a function."""
    door = Door(wrap(nn.Sequential(first, nn.LazyBatchNorm2d())))
    with pytest.raises(
        StateError, match=f"'{name}' .* Run one batch through the model first"
    ):
        door.lend().__enter__()


def test_a_second_run_in_the_process_gives_the_warnings_of_the_first(
    run, caplog
) -> None:
    """The warnings are about a layer in eval mode and a layer without tracking."""

    def build() -> nn.Module:
        layers = [nn.BatchNorm1d(5), nn.BatchNorm1d(5).eval(), nn.BatchNorm1d(5)]
        layers[2].track_running_stats = False
        return nn.Sequential(*layers, nn.Linear(5, 3), nn.Softmax(1)).double()

    told = []
    for _ in range(2):
        caplog.clear()
        with caplog.at_level("WARNING", "flwr"):
            run(FedBN(), build, build(), 2)
        told.append(caplog.messages)
    for words in ("eval mode", "track_running_stats"):
        assert sum(words in text for text in told[0]) == 1
    assert told[0] == told[1]


def test_a_query_takes_no_model(run, mlp) -> None:
    def build() -> nn.Module:
        raise AssertionError("built for a query")

    with pytest.raises(NothingTrainedError, match="built for a query"):
        run(FedAvg(), build, mlp(), 1)


def test_a_compiled_model_is_lent_itself_to_one_message_at_a_time(mlp) -> None:
    """A copy would be compiled again. A failed client's model is not lent again."""
    build = Builds(lambda: torch.compile(mlp(), backend="eager"))
    lend = Door(build).lend
    with lend() as first, lend() as second:
        assert first.model is not second.model
        sent, now = first.arrays()["3.bias"], first.plain.state_dict()["3.bias"]
        now += 1
        assert (sent != now.numpy()).all()
    with lend() as again, lend() as other:
        assert {again.model, other.model} == {first.model, second.model}
    with pytest.raises(KeyError), lend() as cached:
        cached.plain.state_dict()["no such entry"]
    with lend() as one, lend() as two:
        assert cached.model not in (one.model, two.model)
    assert build.count == 3


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def not_plain(model: nn.Module) -> nn.Module:
    model.more = threading.Lock()  # type: ignore[assignment]
    return model


eager = functools.partial(torch.compile, backend="eager")
COMPILED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "wrapped": eager,
    "in place": in_place,
    "wrapped, not plain": lambda model: eager(not_plain(model)),
    "a wrapped part": lambda model: nn.Sequential(eager(model)),
}


@pytest.mark.parametrize("has_loop", [False, True])
@pytest.mark.parametrize("kind", COMPILED)
def test_a_compiled_model_that_is_built_has_the_answers_of_the_plain_one(
    kind, has_loop, mlp, points
) -> None:
    """Each of the three passes needs a second model.

    They try a last batch of one example, find the shape of the outputs for targets in
    columns, and measure the statistics.
    """
    torch._dynamo.reset()

    def loop(model: nn.Module, batches: Any, rules: Any, learning_rate: float) -> float:
        optimizer = rules.wrap(torch.optim.SGD(model.parameters(), learning_rate))
        for inputs, targets in batches:
            optimizer.zero_grad()
            with rules.step(len(targets)):
                loss = mse_loss(model(inputs), targets)
                loss.backward()
            optimizer.step()
        return loss.item()

    data, answers = points(16), []
    data.targets = data.targets.double()
    settings = LocalTraining(
        learning_rate=LearningRate(0.1), batch_size=5, loop=loop if has_loop else None
    )

    def build() -> nn.Module:
        return nn.Sequential(*mlp()[:2], nn.Linear(4, 1)).double()

    start = [entry.numpy() for entry in build().state_dict().values()]
    for wrap in (COMPILED[kind], lambda model: model):
        client = TorchClient(
            lambda wrap=wrap: wrap(build()),
            *(data, data, settings),
            partition_id=0,
            task=REGRESSION,
        )
        arrays, _, metrics = client.fit(start, {"server-round": 1})
        moments, _, _ = client.statistics(arrays, {"server-round": 1})
        assert metrics["dropped-batches"] == 1
        answers.append([*arrays, *moments])
    torch.testing.assert_close(*answers, rtol=1e-12, atol=1e-12)


def test_a_function_that_uses_a_layer_again_is_refused(mlp) -> None:
    """Two simultaneous messages would train one model."""
    for model in (mlp(), in_place(mlp())):
        door = Door(lambda model=model: model)
        with (
            door.lend(),
            pytest.raises(StateError, match="a function that builds a new model"),
            door.lend(),
        ):
            pass


def scaled_by_hooks(num_classes: int) -> nn.Module:
    """Return a layer with another scale in states than in its forward pass."""

    def before(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        state["weight"] = 2 * state["weight"]

    def after(module: nn.Module, _: Any) -> None:
        module.weight.data.mul_(3)

    model = nn.Linear(2, num_classes)
    model.register_load_state_dict_pre_hook(before)
    model.register_load_state_dict_post_hook(after)
    return model


class DoublesExtra(nn.Linear):
    """A layer with an extra state."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(2, num_classes)
        self.extra = torch.rand(2)

    def get_extra_state(self) -> torch.Tensor:
        return self.extra

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.extra = 2 * state


@pytest.mark.parametrize("make", [mnasnet0_5, scaled_by_hooks, DoublesExtra])
def test_states_are_loaded_as_load_state_dict_does(make, same_bits) -> None:
    """Torchvision's MNASNet has its own way to load."""
    client_model, loaded, other = (make(num_classes=3) for _ in range(3))
    load_state(client_model, other.state_dict())
    loaded.load_state_dict(other.state_dict())
    same_bits(client_model.state_dict(), loaded.state_dict())


def test_a_model_of_two_clients_ends_the_run(run, mlp) -> None:
    """Otherwise only the first client would train, and its model would be the result."""
    with pytest.raises(ConfigError, match="the model was used by an earlier message"):
        run(FedAvg(), mlp(), mlp(), 2)
    parts = mlp()
    run(FedAvg(min_train_nodes=1, min_evaluate_nodes=1), mlp, mlp(), 1)
    first, *others = (nn.Sequential(parts[0], nn.Linear(5, 3)) for _ in range(3))
    with Door(first).lend():
        pass
    for reuse, second in enumerate(others):
        with pytest.raises(StateError, match="'0' of the model") as raised:
            Door(second, reuse=bool(reuse)).lend().__enter__()
        assert ("TorchClient(..., reuse_model=True)" in str(raised.value)) != reuse


def test_a_client_has_its_model_for_all_messages(mlp, same_bits) -> None:
    model = mlp()
    door = Door(model)
    for _ in range(2):
        with door.lend() as lent:
            assert lent.model is model
            model[0].weight.data += 1
    same_bits(model.state_dict(), mlp().state_dict())
    # The client is gone, and the model may have its state.
    del door, lent
    with pytest.raises(StateError, match="the model was used by an earlier message"):
        Door(model).lend().__enter__()


def test_a_model_that_may_be_used_again_serves_one_message_at_a_time(mlp) -> None:
    model = mlp()
    first, second = Door(model, reuse=True), Door(model, reuse=True)
    with (
        first.lend(),
        pytest.raises(StateError, match="by two messages at once"),
        second.lend(),
    ):
        pass
    with second.lend() as lent:
        assert lent.model is model


class Weighted(nn.Module):
    """A loss with a state."""

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs.sum()


def weighted(given: Any) -> Any:
    return lambda outputs, targets: mse_loss(outputs, targets) * len(given)


OF_ONE_CLIENT = {
    "module": Weighted,
    "closure": lambda: weighted([1]),
    "partial": lambda: functools.partial(Weighted()),
    "method": lambda: Weighted().forward,
    "builtin method": lambda: random.Random(3).gauss,
}
SHARED = {
    "function": lambda: mse_loss,
    "closure": lambda: weighted("1"),
    "of torch": nn.MSELoss,
    "partial": lambda: functools.partial(mse_loss, reduction="sum"),
}


@pytest.mark.parametrize("kind", OF_ONE_CLIENT)
def test_a_loss_or_a_loop_that_may_have_a_state_serves_one_client(mlp, kind) -> None:
    for name in ("loss", "training_loss", "loop"):
        given = OF_ONE_CLIENT[kind]()
        task = (
            CLASSIFICATION if name == "loop" else replace(REGRESSION, **{name: given})
        )
        loop = given if name == "loop" else None
        first = Door(mlp, task, loop)
        for _ in range(2):
            with first.lend():
                pass
        remedy = "loop=MyLoop" if name == "loop" else "task=lambda model"
        with pytest.raises(StateError, match=f"was used by .*{remedy}"):
            Door(mlp, task, loop).lend().__enter__()


@pytest.mark.parametrize("kind", SHARED)
def test_a_function_or_a_loss_of_torch_serves_all_clients(mlp, kind) -> None:
    task = replace(REGRESSION, loss=SHARED[kind]())
    for _ in range(2):
        with Door(mlp, task).lend():
            pass


def _nonlocal() -> Callable[..., Tensor]:
    count = 0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return functional.cross_entropy(outputs, targets) * count

    return loss


def _attribute() -> Callable[..., Tensor]:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        loss.count = getattr(loss, "count", 0) + 1
        return functional.cross_entropy(outputs, targets) * loss.count

    return loss


def _default() -> Callable[..., Tensor]:
    def loss(outputs: Tensor, targets: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
        seen.append(1)
        return functional.cross_entropy(outputs, targets) * len(seen)

    return loss


def _tensor() -> Callable[..., Tensor]:
    count = torch.zeros(())

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        count.add_(1)
        return functional.cross_entropy(outputs, targets) * count

    return loss


class _Of:
    count = 0

    @classmethod
    def loss(cls, outputs: Tensor, targets: Tensor) -> Tensor:
        cls.count += 1
        return functional.cross_entropy(outputs, targets) * cls.count


def _each_other() -> Callable[..., Tensor]:
    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return n > 0 and even(n - 1)

    return lambda outputs, targets: functional.cross_entropy(outputs, targets) * even(2)


def _weights() -> Callable[..., Tensor]:
    weights = torch.ones(2)
    return lambda outputs, targets: functional.cross_entropy(
        outputs, targets, weights.to(outputs)
    )


def _used_twice(loss: Callable[..., Tensor]) -> None:
    task = replace(CLASSIFICATION, training_loss=loss)
    for _ in range(2):
        with Door(lambda: nn.Linear(2, 2), task).lend() as lent:
            lent.task.step(lent.model, torch.ones(2, 2), torch.tensor([0, 1]))


@pytest.mark.parametrize(
    "make", [_nonlocal, _attribute, _default, _tensor, lambda: _Of.loss]
)
def test_a_function_with_state_is_not_shared(make) -> None:
    with pytest.raises(StateError, match="the training_loss was used by an earlier"):
        _used_twice(make())


@pytest.mark.parametrize(
    "make", [_each_other, _weights, lambda: functional.cross_entropy]
)
def test_a_function_without_state_is_shared(make) -> None:
    _used_twice(make())


class Counts(nn.Module):
    """A layer with an attribute outside the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x


def test_a_message_that_changes_more_than_the_state_dict_breaks_the_promise(
    mlp,
) -> None:
    def counting() -> nn.Module:
        return nn.Sequential(*mlp(), Counts())

    def hooked() -> nn.Module:
        model, seen = mlp(), []
        model[0].register_forward_hook(lambda *_: seen.append(1))
        return model

    x = torch.ones(4, 5, dtype=torch.float64)
    for build, change, name in (
        (counting, lambda model: model(x), "attribute 'count' of layer '4'"),
        (hooked, lambda model: model(x), "attribute '_forward_hooks' of layer '0'"),
        (
            mlp,
            lambda model: model[0].requires_grad_(False),
            "'_parameters' of layer '0'",
        ),
        (mlp, lambda model: setattr(model[1], "momentum", None), "'momentum' of layer"),
        (mlp, lambda model: model.float(), "'_parameters' of layer '0'"),
    ):
        kept_for_run("facts", set).clear()
        for _ in range(2):  # each message fails, not only the first
            with (
                pytest.raises(StateError, match=name),
                Door(build, reuse=True).lend("") as lent,
            ):
                change(lent.model)
        with Door(build).lend("") as lent:
            change(lent.model)


@pytest.mark.parametrize("spelling", ["function", "lambda", "closure", "partial"])
def test_functions_of_the_client_function_build_one_model_for_a_message(
    run, mlp, spelling
) -> None:
    calls = []

    def build(times: int = 1) -> nn.Module:
        calls.append(times)
        return mlp()

    # The functions below refer to this one by a global name, and so to plain values only.
    global _built
    _built = build
    spellings = {
        "function": lambda: _module_level,
        "lambda": lambda: lambda: _built(1),
        "closure": lambda times=1: lambda: _built(times),
        "partial": lambda: functools.partial(_module_level, 1),
    }
    made = spellings[spelling]
    for reuse, count in ((False, 16), (True, 1)):
        calls.clear()
        app = _app_of(made, reuse)
        with InProcessGrid(app, 2) as grid:
            FedAvg().start(grid, to_record(mlp().state_dict()), num_rounds=4)
        assert len(calls) == count


def test_few_objects_of_client_functions_are_kept(mlp) -> None:
    kept: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    for _ in range(40):
        data = Weighted()  # an object, like a data set
        kept.add(data)
        with Door(lambda data=data: mlp() if data else None, reuse=True).lend():
            pass
    del data
    gc.collect()
    assert len(kept) <= 11


_built: Callable[..., nn.Module] = nn.Module


def _module_level(times: int = 1) -> nn.Module:
    return _built(times)


def _app_of(made: Callable[[], Any], reuse: bool) -> Any:
    inputs = torch.randn(8, 5, dtype=torch.float64)
    data = torch.utils.data.TensorDataset(inputs, torch.arange(8) % 3)
    settings = LocalTraining(learning_rate=LearningRate(0.1), local_steps=1)

    def client(context: Any) -> TorchClient:
        return TorchClient(
            made(), data, data, settings, context=context, reuse_model=reuse
        )

    return client_app(client)


@pytest.mark.parametrize("seconds", [0, 0.6])
def test_a_cost_of_building_is_told_once(caplog, monkeypatch, mlp, seconds) -> None:
    """The function takes 0.6 seconds in one case by the clock of the test."""
    clock = [0.0]
    monkeypatch.setattr(model_door.time, "perf_counter", lambda: clock[0])

    def build() -> nn.Module:
        clock[0] += seconds
        return mlp()

    with caplog.at_level("INFO", "flwr"):
        for _ in range(5):
            with Door(build).lend():
                clock[0] += 1
    told = sum("reuse_model=True" in text for text in caplog.messages)
    assert told == (seconds > 0)


def test_a_function_that_returns_no_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="returns a NoneType"):
        Door(lambda: None).lend().__enter__()  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("method", [HBN, combined(Ditto, Scaffold)])
def test_second_models_give_equal_bits_however_the_model_is_given(
    run, mlp, method, same_bits
) -> None:
    """HBN's layers accept one example, though torch's refuse it."""
    found = []
    for kind, reuse in (("function", False), ("model", False), ("function", True)):
        app = _app_with_loop(mlp if kind == "function" else None, mlp, reuse)
        with InProcessGrid(app, 2) as grid:
            arrays = to_record(mlp().state_dict())
            found.append(method().start(grid, arrays, num_rounds=2).arrays)
    for one in found[1:]:
        same_bits(*(each.to_torch_state_dict() for each in (found[0], one)))


def _app_with_loop(build: Any, mlp: Any, reuse: bool) -> Any:
    def loop(model: nn.Module, batches: Any, rules: Any, learning_rate: float) -> float:
        optimizer = rules.wrap(torch.optim.SGD(model.parameters(), learning_rate))
        for inputs, targets in batches:
            optimizer.zero_grad()
            with rules.step(len(targets)):
                loss = functional.cross_entropy(model(inputs), targets)
                loss.backward()
            optimizer.step()
        return loss.item()

    draws = torch.Generator().manual_seed(0)
    inputs = torch.randn(9, 5, dtype=torch.float64, generator=draws)
    data = torch.utils.data.TensorDataset(inputs, torch.arange(9) % 3)
    settings = LocalTraining(
        learning_rate=LearningRate(0.1), batch_size=4, local_epochs=1, loop=loop
    )

    def client(context: Any) -> TorchClient:
        model = build or mlp()
        return TorchClient(
            model, data, data, settings, context=context, reuse_model=reuse
        )

    return client_app(client)
