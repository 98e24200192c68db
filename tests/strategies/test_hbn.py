"""HBN against an oracle of the description, and its laws, messages and refusals."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedbn_flwr.client.bn_rules import Hooks
from fedbn_flwr.errors import ConfigError, NormLayerError
from fedbn_flwr.messages.protocol import HOOKS
from fedbn_flwr.messages.records import from_record, num_bytes
from fedbn_flwr.strategies import HBN, FedAvg
from fedbn_flwr.strategies.hbn import MixedStatistics, Survey, mixed_forward
from fedbn_flwr.training.randomness import torch_generator
from fedbn_flwr.transport.hook_context import HookContext
from tests.support.federation import SEED
from tests.support.points import Points

SIZES = (6, 13, 9)
RATE, MOMENTUM, DECAY, BATCH = 0.2, 0.6, 0.05, 4
BATCHNORM = {"2": 1e-5, "6": 1e-2}
"""The layers of ``net`` with their eps."""


def net() -> nn.Module:
    """Return a float64 net: a layer with three values per example, and one without
    gamma and beta.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = [nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4)]
        second = [nn.Linear(12, 4), nn.BatchNorm1d(4, eps=1e-2, affine=False)]
        layers = [*first, nn.ReLU(), nn.Flatten(), *second, nn.ReLU(), nn.Linear(4, 3)]
        return nn.Sequential(*layers).double()


# --- the oracle -------------------------------------------------------------------------
# It is written from the description, channel by channel, and uses only numbers of torch.


class Oracle:
    """A federation in plain float64, with an attribute for each thing that it has."""

    def __init__(self, data: Sequence[Points], warm_up: int, tau: float) -> None:
        self.data, self.warm_up, self.tau = data, warm_up, tau
        state = {name: one.clone() for name, one in net().state_dict().items()}
        self.weights = {
            name: one
            for name, one in state.items()
            if name.endswith(("weight", "bias"))
        }
        self.mean = {path: state[f"{path}.running_mean"] for path in BATCHNORM}
        self.var = {path: state[f"{path}.running_var"] for path in BATCHNORM}
        self.alphas = [
            {path: torch.zeros(4, dtype=torch.float64) for path in BATCHNORM}
            for _ in data
        ]

    def passes(self, w: dict[str, Tensor], x: Tensor, norm: Any) -> Tensor:
        windows = torch.stack([x[:, i : i + 3] for i in range(3)], 2)  # (N, 3, place)
        h = torch.einsum("nkp,ck->ncp", windows, w["1.weight"][:, 0])
        h = norm("2", h + w["1.bias"][None, :, None], w).clamp(min=0).flatten(1)
        h = norm("6", h @ w["5.weight"].T + w["5.bias"], w).clamp(min=0)
        return h @ w["8.weight"].T + w["8.bias"]

    def normalised(
        self,
        path: str,
        h: Tensor,
        w: dict[str, Tensor],
        alpha: dict[str, Tensor] | None = None,
        inputs: dict[str, list[list[float]]] | None = None,
    ) -> Tensor:
        """Normalise with the batch, or with the mix of ``alpha``, and note inputs."""
        channels = []
        for c in range(4):
            values = h[:, c].reshape(-1)
            mean = sum(values) / len(values)
            var = sum((value - mean) ** 2 for value in values) / len(values)
            if inputs is not None:
                inputs[path][c] += values.tolist()
            if alpha is not None:
                a = 1 / (1 + torch.exp(alpha[path][c]))  # sigmoid(-alpha)
                mean = a * mean + (1 - a) * self.mean[path][c]
                var = a * var + (1 - a) * self.var[path][c]
            y = (h[:, c] - mean) / torch.sqrt(var + BATCHNORM[path])
            if path == "2":
                y = y * w["2.weight"][c] + w["2.bias"][c]
            channels.append(y)
        return torch.stack(channels, 1)

    def survey(self, client: int, inputs: dict[str, list[list[float]]]) -> None:
        """Pass the data once through the received weights, in order."""
        x = self.data[client].inputs
        if len(x) < 2:
            return
        batches = [x[i : i + BATCH] for i in range(0, len(x), BATCH)]
        if len(batches[-1]) == 1:
            batches[-2:] = [torch.cat(batches[-2:])]
        for batch in batches:
            norm = functools.partial(self.normalised, inputs=inputs)
            self.passes(self.weights, batch, norm)

    def trained(self, client: int, number: int) -> dict[str, Tensor]:
        data, warm = self.data[client], number <= self.warm_up
        w = {n: one.clone().requires_grad_() for n, one in self.weights.items()}
        alpha = {p: a.clone().requires_grad_() for p, a in self.alphas[client].items()}
        norm = functools.partial(self.normalised, alpha=None if warm else alpha)
        steps = [(one, DECAY) for one in w.values()]
        steps += [] if warm else [(one, 0.0) for one in alpha.values()]
        speed = [torch.zeros_like(one) for one, _ in steps]
        order = torch.randperm(len(data), generator=self.stream(client, number))
        for positions in torch.split(order, BATCH):
            if len(data) <= BATCH:
                positions = torch.arange(len(data))
            if warm and len(positions) == 1:
                continue  # BatchNorm cannot use it
            outputs = self.passes(w, data.inputs[positions], norm)
            loss = torch.zeros((), dtype=torch.float64)
            for row, target in zip(outputs, data.targets[positions], strict=True):
                loss = loss + torch.log(torch.exp(row).sum()) - row[target]
            loss = loss / len(positions)
            gradients = torch.autograd.grad(loss, [one for one, _ in steps])
            with torch.no_grad():
                for i, (one, decay) in enumerate(steps):
                    speed[i] = MOMENTUM * speed[i] + gradients[i] + decay * one
                    one -= RATE * speed[i]
        self.alphas[client] = {path: a.detach() for path, a in alpha.items()}
        return {name: one.detach() for name, one in w.items()}

    @staticmethod
    def stream(client: int, number: int) -> torch.Generator:
        return torch_generator(SEED, "batches", number, client)

    def round(self, number: int) -> None:
        inputs = {path: [[] for _ in range(4)] for path in BATCHNORM}
        sent = []
        for client in range(len(self.data)):
            self.survey(client, inputs)
            sent.append(self.trained(client, number))
        total = sum(len(data) for data in self.data)
        for name in self.weights:
            parts = zip(self.data, sent, strict=True)
            self.weights[name] = sum(len(d) / total * w[name] for d, w in parts)
        tau = 1.0 if number <= self.warm_up else self.tau
        for path in BATCHNORM:
            for c in range(4):
                values = inputs[path][c]  # the inputs of all clients
                mean = sum(values) / len(values)
                squares = sum((value - mean) ** 2 for value in values)
                var = squares / (len(values) - 1)
                for old, new in ((self.mean, mean), (self.var, var)):
                    old[path][c] = (1 - tau) * old[path][c] + tau * new

    def state(self) -> dict[str, Tensor]:
        means = {f"{path}.running_mean": one for path, one in self.mean.items()}
        variances = {f"{path}.running_var": one for path, one in self.var.items()}
        zero = torch.tensor(0)
        counters = {f"{path}.num_batches_tracked": zero for path in BATCHNORM}
        return {**self.weights, **means, **variances, **counters}


@pytest.mark.parametrize(("warm_up", "sizes"), [(1, SIZES), (0, (*SIZES, 1))])
def test_a_run_equals_the_oracle(federate, points, warm_up, sizes) -> None:
    """Clients differ in size. A client with one example measures nothing.

    One of the runs gives the clients the function instead of a model.
    """
    data = [points(size, client) for client, size in enumerate(sizes)]
    oracle = Oracle(data, warm_up, 0.3)
    strategy = HBN(statistics_momentum=0.3, statistics_warm_up=warm_up)
    options = {"sgd_momentum": MOMENTUM, "weight_decay": DECAY, "batch_size": BATCH}
    options["built"] = not warm_up
    run = federate(strategy, net, data, rounds=4, rate=RATE, **options)
    for number, state in enumerate(run.history):
        if number:
            oracle.round(number)
        wanted = oracle.state()
        assert state.keys() == wanted.keys()
        for name, array in state.items():
            text = f"round {number}: {name}"
            close = {"rtol": 1e-9, "atol": 1e-12, "err_msg": text}
            np.testing.assert_allclose(array, wanted[name].numpy(), **close)
            assert array.dtype == wanted[name].numpy().dtype, text
    for client, alphas in enumerate(oracle.alphas):
        kept = run.kept(client)["fedbn-flwr.rules"]
        assert {*kept} == {f"mixed-statistics/{path}.alpha" for path in alphas}
        for path, alpha in alphas.items():
            assert alpha.abs().max() > 1e-3
            own = kept[f"mixed-statistics/{path}.alpha"]
            np.testing.assert_allclose(own, alpha.numpy(), rtol=1e-9, atol=1e-12)


# --- the layer --------------------------------------------------------------------------
@pytest.mark.parametrize("trains", [True, False])
def test_a_layer_at_the_ends_of_alpha_is_batchnorm(trains: bool) -> None:
    x = torch.randn(3, 2, 4, 2, 2, dtype=torch.float64)
    layer = nn.BatchNorm3d(2).double()
    layer.running_mean += 1
    alpha = torch.full((2,), -800.0 if trains else 800.0, dtype=torch.float64)
    mixed = mixed_forward(layer, alpha, x)
    torch.testing.assert_close(mixed, layer.train(trains)(x))


def test_one_example_is_enough_and_a_layer_in_eval_mode_does_not_mix() -> None:
    layer, x = nn.BatchNorm1d(3).double(), torch.rand(1, 3, dtype=torch.float64)
    alpha = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    # The variance is half of 1.
    y = x / 2 / (0.5 + layer.eps) ** 0.5
    torch.testing.assert_close(mixed_forward(layer, alpha, x), y)
    assert torch.equal(mixed_forward(layer.eval(), alpha, x), layer(x))
    # No rows have no statistics, which would make alpha NaN.
    empty = mixed_forward(layer.train(), alpha, x[:0])
    assert torch.autograd.grad(empty.sum(), alpha, allow_unused=True) == (None,)


# --- the round --------------------------------------------------------------------------
def test_messages_have_only_the_model_and_alpha_stays(federate, datasets) -> None:
    """The steps before a test mix as in the round."""
    strategy = HBN(eval_on="personal-own", fine_tune=3)
    run = federate(strategy, net, datasets, rounds=2)
    tested = [config.get(HOOKS) for config in run.grid.config("evaluate")]
    assert tested == [None] * 3 + ['["mixed-statistics"]'] * 3
    hooks = [json.loads(config[HOOKS]) for config in run.grid.config()]
    assert hooks == [["survey"]] * 3 + [["survey", "mixed-statistics"]] * 3
    sent, received = run.grid.of("train"), run.grid.of("train", replies=True)
    counts = []
    for down, up in zip(sent, received, strict=True):
        (model,), (reply,) = (one.content.array_records.values() for one in (down, up))
        assert num_bytes(model) == num_bytes(reply)
        state = from_record(reply)
        assert state.keys() == run.state.keys()
        counts.append([int(state[f"{p}.num_batches_tracked"]) for p in BATCHNORM])
    assert sorted(counts) == sorted([[3 * size, size] for size in SIZES] * 2)


def test_a_loop_of_the_user_takes_the_same_steps(federate, datasets) -> None:
    """The loop sets only the gradients of the model to zero, and has a schedule."""

    def loop(model, batches, rules, learning_rate) -> float:
        sgd = rules.wrap(torch.optim.SGD(model.parameters(), 1.0, momentum=0.5))
        groups = len(sgd.param_groups)
        for inputs, targets in batches:
            model.zero_grad()
            with rules.step(len(targets)):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                loss.backward()
            sgd.param_groups[0]["lr"] = learning_rate
            sgd.step()
            assert [group["lr"] for group in sgd.param_groups] == [0.1] * groups
        return float(loss.detach())

    ours = federate(HBN(), net, datasets, loop=loop)
    theirs = federate(HBN(), net, datasets, sgd_momentum=0.5)
    for name, array in ours.state.items():
        np.testing.assert_allclose(array, theirs.state[name], rtol=1e-9, atol=1e-12)


class Auxiliary(nn.Module):
    """A model with a layer that only the training calls."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.late = net(), nn.BatchNorm1d(3).double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        return self.late(y) if torch.is_grad_enabled() else y


def test_a_layer_that_no_pass_measured_keeps_its_global_statistics(
    federate, datasets
) -> None:
    run = federate(HBN(), Auxiliary, datasets, rounds=2)
    start = run.history[0]
    for leaf in ("running_mean", "running_var", "num_batches_tracked"):
        name = f"late.{leaf}"
        assert np.array_equal(run.state[name], start[name])
    assert not np.array_equal(run.state["late.weight"], start["late.weight"])


def test_the_end_of_a_round_restores_model_and_optimizer(mlp, points) -> None:
    model, hook = mlp(), MixedStatistics()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    rules = Hooks(model, {"mixed-statistics": hook})
    with rules.block():
        rules.wrap(sgd)
        assert "forward" in vars(model[1])
        points(8).loss(model).backward()
        sgd.step()
    assert "forward" not in vars(model[1])
    assert len(sgd.param_groups) == 1
    assert hook.keep()["1.alpha"].any()


# --- refusals ---------------------------------------------------------------------------
class Own(nn.BatchNorm1d):
    """A subclass without a change."""


def test_a_subclass_of_batchnorm_is_refused_in_one_sentence(
    federate, datasets, mlp
) -> None:
    def model() -> nn.Module:
        changed = mlp()
        changed[1] = Own(4).double()
        return changed

    words = "layer '1' is a Own, but hbn mixes statistics only in torch's own"
    with pytest.raises(ConfigError, match=words):
        federate(HBN(), model, datasets)
    with pytest.raises(NormLayerError, match=words):
        MixedStatistics().begin(model())
    model_in_eval = model()
    model_in_eval[1].eval()
    MixedStatistics().begin(model_in_eval)  # the layer keeps its forward pass


def test_a_loop_outside_of_a_client_has_no_data_to_survey() -> None:
    with pytest.raises(ConfigError, match="so it needs a TorchClient"):
        Survey(HookContext({}))


@pytest.mark.parametrize(
    "wrong", [{"statistics_momentum": 0.0}, {"statistics_warm_up": -1}]
)
def test_settings_have_limits(wrong) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        HBN(**wrong)


def test_a_fixed_layer_keeps_its_counter_and_an_example_may_have_many_values(
    federate, datasets
) -> None:
    """Layer 1 of (N, 1, 5) counts 5 values an example, and is repeated to 1.1 million."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        wide = nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Upsample(scale_factor=5500))
        body = [wide, nn.BatchNorm1d(1), nn.AdaptiveAvgPool1d(5), nn.Flatten()]
        built = nn.Sequential(*body, nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
        built[4].num_batches_tracked.fill_(7)
        return built

    data = [Points(one.inputs.repeat(4, 1), one.targets.repeat(4)) for one in datasets]
    run = federate(HBN(train_only="1,5"), model, data, rounds=1)
    assert [report.rejected for report in run.strategy.reports] == [{}]
    assert run.state["4.num_batches_tracked"] == 7


@pytest.mark.parametrize("path", BATCHNORM)
def test_layers_outside_the_choice_are_trained_and_averaged_as_by_fedavg(
    federate, datasets, path: str
) -> None:
    """In a warm-up round, HBN differs from FedAvg only in its layers' statistics."""
    chosen, every, plain = (
        federate(strategy, net, datasets, rounds=1).state
        for strategy in (HBN(layers=path), HBN(), FedAvg())
    )
    own = {f"{path}.{leaf}" for leaf in ("running_mean", "running_var")}
    own.add(f"{path}.num_batches_tracked")
    for name, value in chosen.items():
        assert np.array_equal(value, plain[name]) == (name not in own), name
        # The inputs of the first layer do not depend on the choice.
        if name in own and path == "2":
            np.testing.assert_allclose(value, every[name], rtol=1e-12)
