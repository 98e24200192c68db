"""A training loop of the user gives the results of the package's loop."""

from __future__ import annotations

import copy
import itertools
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    mse_loss,
)
from torch.nn.utils import prune
from torch.utils.data import TensorDataset

from fedbn_flwr.errors import ConfigError, FedBNError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.runs.check_start import checked_config
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.strategies import STRATEGIES
from tests.support.every_key import BASE, OWN
from tests.support.fast import fast
from tests.support.runs import lines_of, state_of
from tests.support.tables import generator_of

CASES = {
    **{name: {"strategy": name, **OWN.get(name, {})} for name in STRATEGIES},
    "a model of each client, tuned": {"strategy": "fedbn", "fine-tune": 2},
    "a head, tuned": {"strategy": "fedavg", "personal": "last-layer", "fine-tune": 2},
    "FedTAN by messages": {"strategy": "fedtan", "fedtan-transport": "messages"},
    "a batch of one example": {"batch-size": 13, "local-steps": 0, "num-clients": 8},
    "random images": {"model": "lenet", "augment": "crop2,flip"},
    "momentum that stays": {"sgd-momentum": 0.9, "momentum-scope": "local"},
}


def sgd(model, batches, rules, learning_rate, momentum=0.0):
    """Train as the package does."""
    optimizer = torch.optim.SGD(model.parameters(), learning_rate, momentum=momentum)
    rules.wrap(optimizer)
    total, count = 0.0, 0
    for inputs, targets in batches:
        optimizer.zero_grad()
        with rules.step(len(targets)):
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
        optimizer.step()
        total += loss.item() * len(targets)
        count += len(targets)
    # The next client has gradients again, and does not see the values of this client.
    torch.set_grad_enabled(False)
    model.register_forward_hook(lambda m, args, out: out * 2 if m.training else out)
    for layer in model.modules():
        layer.momentum = 0.7
    return total / count


def heavy(model, batches, rules, learning_rate):
    return sgd(model, batches, rules, learning_rate, 0.9)


def skipping(model, batches, rules, learning_rate):
    return sgd(model, itertools.islice(batches, 1), rules, learning_rate)


def raising(model, batches, rules, learning_rate):
    return {}[learning_rate]


def replacing(model, batches, rules, learning_rate):
    model.fc = nn.Linear(model.fc.in_features, model.fc.out_features)
    return sgd(model, batches, rules, learning_rate)


def pruning(model, batches, rules, learning_rate, undo=False):
    loss = sgd(model, batches, rules, learning_rate)
    prune.l1_unstructured(model.fc, "weight", 0.3)
    if undo:
        prune.remove(model.fc, "weight")
    return loss


def pruning_for_good(model, batches, rules, learning_rate):
    return pruning(model, batches, rules, learning_rate, undo=True)


def copying(model, batches, rules, learning_rate):
    return sgd(copy.deepcopy(model), batches, rules, learning_rate)


def idle(model, batches, rules, learning_rate):
    return 0.0


def silent(model, batches, rules, learning_rate):
    sgd(model, batches, rules, learning_rate)


OF_THE_PACKAGE = ("seconds", "train-accuracy")
CLOSE = {"rel": 2e-4, "abs": 2e-5}


def outcome(settings: dict, out: Path) -> tuple:
    """Run, and return the numbers that do not depend on the loop, and the model."""
    run(Config.make(settings), out)
    numbers = {}
    for line in lines_of(out):
        for key, value in line.items():
            if isinstance(value, (int, float)) and key not in OF_THE_PACKAGE:
                numbers[line["round"], key] = value
    return numbers, state_of(out)


# A change of the gradients, an exchange in each step, a second training and a state
# that stays.
QUICK = ("scaffold", "fedtan", "a model of each client, tuned", "momentum that stays")


@pytest.mark.parametrize("case", fast(CASES, *QUICK))
def test_each_method_computes_as_with_the_loop_of_the_package(
    case: str, tmp_path
) -> None:
    settings = {**BASE, "validation-share": 0.1, **CASES[case]}
    numbers, model = outcome(settings, tmp_path / "plain")
    loop = "heavy" if settings.pop("sgd-momentum", 0) else "sgd"
    settings["loop"] = f"{__name__}:{loop}"
    own_numbers, own_model = outcome(settings, tmp_path / "own")
    assert own_numbers == pytest.approx(numbers, **CLOSE)
    for name, value in model.items():
        torch.testing.assert_close(own_model[name], value, rtol=2e-4, atol=2e-5)


def net(num_classes: int, features: int) -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(features), nn.Linear(features, num_classes))


def flat_net(num_classes: int, features: int) -> nn.Module:
    """Return a network with outputs (B,)."""
    return net(num_classes, features).append(nn.Flatten(0))


def rows(site: int, part: str) -> TensorDataset:
    x = torch.randn(24, 3, generator=generator_of(site, part))
    return TensorDataset(x, (x[:, :1] > x[:, 1:2]).long())


rows.input_shape = (3,)  # type: ignore[attr-defined]
LOSSES = {"regression": mse_loss, "binary": binary_cross_entropy_with_logits}


# The fast cases have each task and each shape of outputs once.
SHAPES = itertools.product(LOSSES, ["net", "flat_net"])


@pytest.mark.parametrize(
    ("task", "model"), fast(SHAPES, "regression-flat_net", "binary-net")
)
def test_targets_in_columns_have_the_shape_and_type_of_the_outputs(
    task: str, model: str, tmp_path, monkeypatch
) -> None:
    monkeypatch.setitem(globals(), "cross_entropy", LOSSES[task])
    own = {"dataset": f"{__name__}:rows", "model": f"{__name__}:{model}", "task": task}
    numbers, _ = outcome({**BASE, **own}, tmp_path / "plain")
    own["loop"] = f"{__name__}:sgd"
    own_numbers, _ = outcome({**BASE, **own}, tmp_path / "own")
    assert own_numbers == pytest.approx(numbers, **CLOSE)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loop": "sgd"}, "module:function"),
        ({"loop": f"{__name__}:sdg"}, "sdg"),
        ({"optimizer": "adam"}, "adam' has no effect: it is for an empty loop"),
        ({"amp": True}, "amp"),
    ],
)
def test_settings_that_do_not_fit_a_loop_are_refused(settings, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        checked_config(Config.make({**BASE, "loop": f"{__name__}:sgd", **settings}))


@pytest.mark.parametrize(
    ("loop", "strategy", "words"),
    [
        ("raising", "fedavg", r"loop raising raised KeyError in line \d+ of test_own"),
        ("replacing", "fedavg", "loop replacing replaced module 'fc'"),
        (
            "pruning",
            "fedavg",
            r"loop pruning removed or renamed parameter 'fc.weight' \(1 such\)",
        ),
        ("idle", "fedavg", "loop idle took no batch"),
        ("silent", "fedavg", "loop silent raised TypeError .* not 'NoneType'"),
        ("copying", "fedavg", r"loop copying changed no parameter .* in \d+ steps"),
        ("idle", "fedprox", "nothing in the block has used this object"),
        ("heavy", "scaffold", "momentum=0.9 must be 0"),
    ],
)
def test_a_loop_that_leaves_something_out_is_named(
    loop: str, strategy: str, words: str, tmp_path
) -> None:
    config = Config.make({**BASE, "strategy": strategy, "loop": f"{__name__}:{loop}"})
    with pytest.raises(FedBNError, match=words):
        run(config, tmp_path)


@pytest.mark.parametrize("loop", ["sgd", "skipping", "pruning_for_good"])
def test_a_loop_that_skips_batches_is_named_once(loop: str, tmp_path, caplog) -> None:
    config = Config.make({**BASE, "local-steps": 2, "loop": f"{__name__}:{loop}"})
    run(config, tmp_path)
    named = "loop skipping leaves out batches: in a round, it took 1 and left others."
    assert caplog.text.count(named) == (loop == "skipping")


def test_a_changed_loop_does_not_resume(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings, text = {**BASE, "loop": "my_loop:sgd"}, Path(__file__).read_text()
    Path("my_loop.py").write_text(text)
    run(Config.make({**settings, "num-server-rounds": 2}), Path("out"))
    Path("my_loop.py").write_text(f"{text}# changed\n")
    del sys.modules["my_loop"]
    with pytest.raises(FedBNError, match=r"file of loop 'my_loop:sgd'"):
        run(Config.make({**settings, "resume": True}), Path("out"))
