"""``model=module:function`` is found from here, seeded, and checked early.

The check precedes round 1.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fedbn_flwr.batchnorm.fixed_entries import fixed_entries
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.diagnose_run import diagnose_run
from fedbn_flwr.lab.models import build_model
from fedbn_flwr.lab.objects_of_config import make_model
from fedbn_flwr.lab.results.evaluate import evaluate_run
from fedbn_flwr.lab.results.saved_model import load_model
from fedbn_flwr.lab.runs.check_start import checked_config, moved_buffers
from fedbn_flwr.lab.runs.run import run
from tests.support.runs import moved_entries

CODE = """
import random

import numpy as np
import torch
from torch import nn

def small_net(num_classes, channels):
    return nn.Sequential(nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(4, num_classes))

class Rows(nn.Sequential):
    def __init__(self, num_classes, features, width=8, **more):
        super().__init__(nn.Linear(features, width), nn.BatchNorm1d(width), nn.Linear(width, num_classes))

class Viewed(nn.Module):
    def __init__(self, num_classes, channels, size):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4)
        self.last = nn.Linear(4 * (size - 2) ** 2, num_classes)

    def forward(self, x):
        return self.last(self.norm(self.conv(x)).view(len(x), -1))

def two_outputs(size):
    return nn.Sequential(nn.Flatten(), nn.Linear(size * size, 2))

def pair():
    class Pair(nn.Module):
        def forward(self, x):
            return x, x
    return Pair()

def drawn_elsewhere(features, num_classes):
    model = nn.Linear(features, num_classes)
    model.weight.data = torch.from_numpy(np.random.normal(size=model.weight.shape)).float()
    model.bias.data.fill_(random.random())
    return model

class PairInTraining(nn.Sequential):
    def forward(self, x):
        return (super().forward(x), x) if self.training else super().forward(x)

def pair_in_training(): return PairInTraining(nn.Flatten(), nn.Linear(64, 10))
def frozen(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).requires_grad_(False)
def lazy(): return nn.Sequential(nn.Flatten(), nn.LazyLinear(10))

class Counted(nn.Flatten):
    def get_extra_state(self): return {"steps": 1}
    def set_extra_state(self, state): pass

def counted(num_classes): return nn.Sequential(Counted(), nn.Linear(64, num_classes))

def in_eval(num_classes):
    layers = [nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8)]
    model = nn.Sequential(*layers, nn.Linear(8, num_classes))
    model[2].eval()
    model[4].requires_grad_(False)
    return model

def dropout(): return nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(64, 10))

class Centred(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
        self.register_buffer("centre", torch.zeros(10))
        self.register_buffer("scale", torch.ones(10))

    def forward(self, x):
        x = super().forward(x)
        if self.training:
            self.centre.mul_(0.9).add_(0.1 * x.detach().amax(0))
        return self.scale * (x - self.centre)

def centred(): return Centred()

def needs(depth, num_classes, width): pass
def broken(num_classes): return {}[num_classes]
def no_module(): return 3
def bad_forward(): return nn.Linear(3, 3)
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch) -> Iterator[None]:
    """Provide a working directory with the module, and restore Python's path."""
    (tmp_path / "my_nets.py").write_text(CODE)
    (tmp_path / "my_bad.py").write_text("import not_there_at_all")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("my_nets", None)


def test_a_run_with_an_own_model_in_worker_processes_too(
    quick_config, tmp_path, same_run
) -> None:
    config = quick_config(model="my_nets:small_net", strategy="fedbn")
    alone = run(config, tmp_path / "alone", workers=0)
    same_run(alone, run(config, tmp_path / "workers", workers=2))


@pytest.mark.parametrize("strategy", ["fedavg", "centralized"])
def test_a_model_that_views_its_memory_is_trained_and_tested(
    quick_run, strategy: str
) -> None:
    _, out = quick_run(model="my_nets:Viewed", strategy=strategy)
    assert evaluate_run(out, "digits")


@pytest.mark.parametrize("strategy", ["fixbn", "staticbn", "centralized"])
def test_batchnorm_that_its_function_left_in_eval_mode_stays_so(
    quick_run, strategy: str
) -> None:
    """A layer in train mode without gradients keeps training statistics, as in torch."""
    moved = moved_entries(quick_run(model="my_nets:in_eval", strategy=strategy)[1])
    counter = set() if strategy == "staticbn" else {"4.num_batches_tracked"}
    entries = {f"{index}.{leaf}" for index in "1235" for leaf in ("weight", "bias")}
    # BatchNorm removes the bias before it, so its gradient is rounding or 0.
    noise = {"3.bias"}
    expected = entries | {"4.running_mean", "4.running_var"} | counter
    assert moved - noise == expected - noise


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (
            "my_net:small_net",
            (
                r"module 'my_net' is neither in the working directory.*Did you mean"
                r" 'my_nets:small_net'\?.*or set PYTHONPATH"
            ),
        ),
        ("torchvison:resnet18", r"Did you mean 'torchvision:resnet18'\?"),
        (
            "my_nets:smal_net",
            (
                r"unknown function of .*my_nets\.py: 'smal_net'. Did you mean"
                r" 'small_net'\?"
            ),
        ),
        (
            "my_bad:net",
            (
                "importing my_bad raised ModuleNotFoundError: No module named"
                " 'not_there_at_all'"
            ),
        ),
        (
            "my_nets:needs",
            (
                r"'depth' and 'width'\. With these data, it may take num_classes,"
                r" channels, size"
            ),
        ),
        ("my_nets:broken", "its function raised KeyError: 10"),
        ("my_nets:no_module", "returned a int. Return a torch.nn.Module"),
        (
            "my_nets:two_outputs",
            (
                r"returns shape \(2, 2\) .*classification needs a tensor of shape \(2,"
                r" 10\)"
            ),
        ),
        ("my_nets:pair", "returns a tuple for a batch"),
        ("my_nets:pair_in_training", r"returns a tuple in train mode for a batch"),
        ("my_nets:frozen", "has no parameter to train: all have requires_grad=False"),
        (
            "my_nets:counted",
            r"entries of the model's state are not tensors.*'0\._extra_state' \(dict\)",
        ),
        ("my_nets:lazy", r"have no shape yet.*LazyLinear"),
        (
            "my_nets:bad_forward",
            (
                r"fails for a batch of inputs \(2, 1, 8, 8\): RuntimeError: .*mat1 and"
                r" mat2"
            ),
        ),
    ],
)
def test_what_is_wrong_is_said_before_round_1(
    model: str, problem: str, quick_config
) -> None:
    with pytest.raises(ConfigError, match=problem):
        checked_config(quick_config(model=model))


def test_draws_outside_of_torch_are_seeded_too(quick_config) -> None:
    """The build and the check do not move the generators."""
    before = torch.get_rng_state()
    checked_config(quick_config(model="my_nets:dropout"))
    assert torch.equal(before, torch.get_rng_state())

    def build(state: int, seed: int) -> dict[str, torch.Tensor]:
        random.seed(state)
        np.random.seed(state)
        name = "my_nets:drawn_elsewhere"
        model = build_model(name, num_classes=2, input_shape=(5,), seed=seed)
        after = random.random(), np.random.random()
        random.seed(state)
        np.random.seed(state)
        assert after == (random.random(), np.random.random())
        return model.state_dict()

    first, again, other = build(1, 3), build(2, 3), build(2, 4)
    for name, value in first.items():
        assert torch.equal(value, again[name])
        assert not torch.equal(value, other[name])


@pytest.mark.parametrize("strategy", ["fedavg", "centralized"])
def test_a_model_that_was_edited_after_the_run_is_not_taken_for_it(
    strategy: str,
    quick_run,
    tmp_path,
    monkeypatch,
    caplog,
) -> None:
    """Names and shapes are equal, so the state fits."""
    # Python does not notice a change of two files of the same second and size.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    _, out = quick_run(model="my_nets:small_net", strategy=strategy)
    longer = Config.load(out / "config.yaml", ["resume=true", "num-server-rounds=3"])
    metrics = (out / "metrics.jsonl").read_bytes()

    def edit(code: str, imported: bool = False) -> None:
        (tmp_path / "my_nets.py").write_text(code)
        if not imported:
            sys.modules.pop("my_nets")

    edit("", imported=True)
    load_model(out)  # the code that was imported is used
    edit(CODE.replace("AdaptiveAvgPool2d", "AdaptiveMaxPool2d"))
    evaluate_run(out, "digits", out=tmp_path / "evaluated")
    load_model(out)
    changed = (
        f"the file of model 'my_nets:small_net' ({tmp_path / 'my_nets.py'}) has changed"
        " since the run"
    )
    assert caplog.text.count(changed) == 2
    assert changed in (tmp_path / "evaluated/metrics.json").read_text()
    assert any(note.startswith(changed) for note in diagnose_run(out, 16).notes)
    with pytest.raises(ConfigError, match=r"changed since the run.* Restore the file"):
        run(longer, out)
    assert (out / "metrics.jsonl").read_bytes() == metrics
    edit(CODE)
    assert run(longer, out)["rounds"] == 3


def test_a_moving_average_of_a_users_own_is_no_constant(
    quick_config,
) -> None:
    """Client-level privacy refuses replies that changed a constant."""
    config = quick_config(model="my_nets:centred")
    model = make_model(config)
    assert fixed_entries(model) - moved_buffers(model, config) == {"scale"}
