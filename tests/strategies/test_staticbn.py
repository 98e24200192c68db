"""StaticBN: training by batch statistics, tests by the union's."""

from __future__ import annotations

import functools
import logging

import numpy as np
import pytest
import torch
from torch import nn

from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.errors import ClientPartError
from fedbn_flwr.messages.records import from_record, tensors
from fedbn_flwr.strategies import FBN, FedAvg, StaticBN
from fedbn_flwr.strategies.staticbn import Untracked

SIZES = (6, 13, 9)
UNTRACKED = ("1.running_mean", "1.running_var", "1.num_batches_tracked")


def test_weights_equal_fedavgs_and_the_first_layer_has_the_unions_statistics(
    federate, datasets, mlp
) -> None:
    """Running statistics have no part in training; of one layer the batches do not
    matter: the law.
    """
    model = functools.partial(mlp, dropout=0.3)
    mine = federate(StaticBN(), model, datasets)
    plain = federate(FedAvg(), model, datasets)
    union = torch.cat([data.inputs for data in datasets])
    for before, after in zip(mine.history[1:], plain.history[1:], strict=True):
        assert all(
            before[n].tobytes() == after[n].tobytes()
            for n in after
            if n not in UNTRACKED
        )
        hidden = torch.nn.functional.linear(
            union, *(torch.from_numpy(after[f"0.{n}"]) for n in ("weight", "bias"))
        )
        np.testing.assert_allclose(before["1.running_mean"], hidden.mean(0), rtol=1e-12)
        np.testing.assert_allclose(before["1.running_var"], hidden.var(0), rtol=1e-12)
        assert before["1.num_batches_tracked"] == 0
    assert all(
        mine.state[name].tobytes() == mine.history[-1][name].tobytes()
        for name in mine.state
    )


def test_clients_receive_and_return_the_initial_statistics(
    federate, datasets, mlp
) -> None:
    run = federate(StaticBN(), mlp, datasets)
    start = {name: tensor.numpy() for name, tensor in mlp().state_dict().items()}
    travelled = [
        m
        for m in (*run.grid.sent, *run.grid.received)
        if m.metadata.message_type == "train"
    ]
    assert len(travelled) == 18
    for message in travelled:
        state = from_record(message.content["arrays"])
        assert all(state[name].tobytes() == start[name].tobytes() for name in UNTRACKED)


def test_all_layers_of_a_torchvision_model_have_reestimated_statistics(
    federate, points, torchvision_net
) -> None:
    """Against a plain pass over all data under the final weights: uneven clients,
    smaller last batches.
    """
    datasets = [points(n, i, shape=(3, 40, 40)) for i, n in enumerate((5, 3, 7))]
    run = federate(
        StaticBN(),
        torchvision_net,
        datasets,
        rounds=1,
        rate=0.01,
        batch_size=3,
        local_steps=1,
    )
    final = torchvision_net().train()
    final.load_state_dict(tensors(run.state))
    seen: dict[str, list[torch.Tensor]] = {}
    for path, layer in final.named_modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            values = seen[path] = []
            layer.register_forward_pre_hook(
                lambda _, args, values=values: values.append(args[0].transpose(0, 1))
            )
    with torch.no_grad():
        for data in datasets:
            for inputs in data.inputs.split(3):
                final(inputs)
    for path, batches in seen.items():
        values = torch.cat([batch.flatten(1) for batch in batches], 1)
        np.testing.assert_allclose(
            run.state[f"{path}.running_mean"], values.mean(1), rtol=1e-9, atol=1e-12
        )
        np.testing.assert_allclose(
            run.state[f"{path}.running_var"], values.var(1), rtol=1e-9, atol=1e-14
        )


class Own(nn.BatchNorm1d):
    """Its forward pass does not ask whether it tracks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        named = (self.running_mean, self.running_var, self.weight, self.bias)
        return nn.functional.batch_norm(
            x, *named, self.training, self.momentum, self.eps
        )


@pytest.mark.parametrize("method", [StaticBN, FBN])
def test_a_forward_pass_that_tracks_in_any_case_trains_as_the_plain_one(
    federate, datasets, mlp, same_bits, method
) -> None:
    def own() -> nn.Module:
        model = mlp()
        model[1] = Own(4).double()
        return model

    runs = [federate(method(), model, datasets, rounds=2) for model in (own, mlp)]
    same_bits(*(run.state for run in runs))


def test_a_layer_that_is_no_batchnorm_is_told_from_a_missing_client_part(
    federate, datasets
) -> None:
    """InstanceNorm with running statistics, where the layers were found by names."""

    def model() -> nn.Module:
        norm = nn.InstanceNorm1d(1, track_running_stats=True)
        layers = [nn.Unflatten(1, (1, 5)), norm, nn.Flatten(), nn.Linear(5, 3)]
        return nn.Sequential(*layers).double()

    strategy = StaticBN(parts=split_state(model().state_dict()))
    with pytest.raises(
        ClientPartError,
        match=r"Or the layers are not BatchNorm: pass parts=split_state\(model\)",
    ):
        federate(strategy, model, datasets, rounds=1)


def test_the_hook_restores_the_model(mlp) -> None:
    model, hook = mlp().train(), Untracked()
    hook.begin(model)
    model(torch.randn(4, 5, dtype=torch.float64))
    assert model[1].num_batches_tracked == 0
    hook.end(model)
    model(torch.randn(4, 5, dtype=torch.float64))
    assert model[1].num_batches_tracked == 1


def test_a_model_that_is_in_eval_mode_before_its_training_is_not_tracked(mlp) -> None:
    model, hook = mlp().eval(), Untracked()
    hook.begin(model)
    model.train()(torch.randn(4, 5, dtype=torch.float64))
    assert model[1].num_batches_tracked == 0


def test_a_run_that_stops_between_two_tests_ends_with_the_unions_statistics(
    federate, datasets, mlp, caplog
) -> None:
    """A second run of the strategy is not stopped. The tests in between are told of
    their statistics.
    """
    strategy = StaticBN(eval_every=3)

    def stop(server_round: int) -> None:
        strategy.stopped = server_round == 5

    logging.getLogger("flwr").propagate = True
    with caplog.at_level(logging.WARNING, "flwr"):
        stopped = federate(strategy, mlp, datasets, rounds=9, evaluate_fn=stop)
    told = [
        text[:7]
        for text in caplog.messages
        if "has statistics that are not re-estimated" in text
    ]
    assert told == ["round 1", "round 2", "round 4", "round 5"]
    whole = federate(StaticBN(), mlp, datasets, rounds=5)
    for name, array in whole.state.items():
        np.testing.assert_array_equal(stopped.state[name], array, err_msg=name)
    assert len(federate(strategy, mlp, datasets, rounds=2).strategy.reports) == 2
