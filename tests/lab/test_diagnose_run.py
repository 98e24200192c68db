"""``fedbn-flwr doctor``: planted faults, healthy runs, models, saved states."""

from __future__ import annotations

import contextlib
import html
import itertools
import json
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import fedbn_flwr
from fedbn_flwr.doctor import Diagnosis, Finding, remedies
from fedbn_flwr.lab.config import Config, data_of, read_overrides
from fedbn_flwr.lab.diagnose_run import (
    diagnose_run,
    examine,
    fitting,
    training_of,
)
from fedbn_flwr.lab.objects_of_config import make_model
from fedbn_flwr.lab.partitioned.counts import usual_steps
from fedbn_flwr.lab.partitioned.partitioned_data import count_clients, partitioned_data
from fedbn_flwr.lab.report.words import of_mismatch
from fedbn_flwr.lab.runs.check_start import checked_config
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.strategies import STRATEGIES
from tests.support.checkout import ROOT
from tests.support.commands import call, output_of
from tests.support.fast import fast
from tests.support.runs import QUICK, page_of
from tests.support.tables import table, targets_of_tasks

BENCH = runpy.run_path(str(ROOT / "benchmarks/doctor_cases.py"))
CASES, HEALTHY = BENCH["CASES"], BENCH["HEALTHY"]


def start(out: Path, **settings) -> Path:
    run(Config.make(settings), out)
    return out


@pytest.fixture(scope="module")
def skewed(tmp_path_factory) -> Path:
    # The benchmark has more rounds.
    few = {"num-server-rounds": 20, "eval-every": 20}
    settings = {**CASES["label skew, E = 1"].settings, **few}
    return start(tmp_path_factory.mktemp("doctor") / "skewed", **settings)


def test_label_skew_with_one_local_step(skewed) -> None:
    few = ("doctor", skewed, "--max-examples", 100, "--trust")
    first = json.loads(output_of(*few, "--json"))["findings"][0]
    assert first["id"] == "label-skew"
    assert first["remedies"][0]["setting"] == "strategy=fedtan"
    assert first["numbers"]["local-steps"] == 1
    assert call(*few, "--strict").exit_code == 1


def test_what_is_not_known_is_no_success_of_a_strict_call(
    monkeypatch, tmp_path
) -> None:
    """The call is neither a success nor a finding, and has its own exit code.

    The path of the file is relative to the home.
    """
    monkeypatch.setenv("HOME", str(tmp_path))
    torch.save(nn.BatchNorm1d(3).state_dict(), tmp_path / "state.pt")
    done = call("doctor", "~/state.pt", "--strict")
    assert done.exit_code == 3
    assert "Unknown: 2 parts" in done.output
    output_of("doctor", "~/state.pt")
    answer = Diagnosis("a state", [])
    monkeypatch.setattr("fedbn_flwr.doctor.diagnose_state", lambda *_, **__: answer)
    output_of("doctor", "~/state.pt", "--strict")


def test_a_planted_fault_and_its_remedy(tmp_path) -> None:
    case = CASES["batch size 2"]
    few = {"num-server-rounds": 1, "eval-every": 1, "local-steps": 60}
    out = start(tmp_path / "run", **{**case.settings, **few})
    first = diagnose_run(out, 200).findings[0]
    assert (first.id, first.remedies[0].setting) == (case.finding, case.remedy)


@pytest.mark.parametrize("seed", fast(range(2), 0))
def test_nothing_is_found_in_a_healthy_run(seed: int, tmp_path) -> None:
    short = {**HEALTHY, "num-server-rounds": 4, "eval-every": 4}
    assert diagnose_run(start(tmp_path / "run", **short, seed=seed), 200).findings == []


LISTS = [found for found in vars(remedies).values() if isinstance(found, list)]
REMEDIES = {one.setting: one for one in itertools.chain(*LISTS)}


def test_the_settings_of_remedies_are_config_keys_and_values() -> None:
    """A remedy ``key=value ...`` is a config that can run.

    Other remedies are calls or sentences.
    """
    keys = {field.alias or name for name, field in Config.model_fields.items()}
    tried = set()
    for setting in REMEDIES:
        pairs = [word.partition("=") for word in setting.split()]
        if all(key in keys and value for key, _, value in pairs):
            Config.make({key: yaml.safe_load(value) for key, _, value in pairs})
            tried.add(pairs[0][0])
    assert tried >= {
        "strategy",
        "norm",
        "batch-size",
        "recalibrate",
        "bn-momentum",
        "agc",
    }


TASKS_OF_TABLES = ("binary", "classification", "multi-label", "regression")
# A model of FedWon has no BatchNorm, so it has no remedies.
METHODS = [name for name in STRATEGIES if name != "fedwon"]
# These settings of a run have no effect, or no test, with the method of a remedy.
OWN_SETTINGS = {
    "fedbn": {"eval-on": "personal-own,averaged-bn"},
    "fixbn": {"lr-decay-at": "freeze", "freeze-at": 0.3},
}


@pytest.mark.parametrize("task", ["digits", *fast(TASKS_OF_TABLES, "binary")])
@pytest.mark.parametrize("strategy", fast(METHODS, "fedbn", "fixbn"))
def test_no_remedy_is_refused(strategy: str, task: str, monkeypatch) -> None:
    """The law covers each remedy of each finding: `check` accepts it, or it runs."""
    own = OWN_SETTINGS.get(strategy, {})
    settings = {"strategy": strategy, "num-clients": 2, **own}
    if task != "digits":
        x = np.random.default_rng(1).normal(size=(40, 4)).astype(np.float32)
        y = targets_of_tasks(x)[task]
        dataset = table(monkeypatch, x, y, np.arange(40) % 2)
        settings |= {"dataset": dataset, "model": "mlp", "task": task}
    config = Config.make(settings)
    keys, model = config.to_mapping(), make_model(config)
    first = next(name for name, _ in model.named_parameters())
    every = [*REMEDIES.values(), *remedies.frozen_but_moving(first)]
    (found,) = fitting([Finding("any", "", [], {}, every)], config)
    (mismatch,) = fitting([Finding("b", "", [], {}, remedies.MISMATCH)], config)
    assert f"train-only={first}" in found.remedies[-1].setting
    inputs = torch.zeros(8, *data_of(config).shape)
    for remedy in (*found.remedies, *mismatch.remedies):
        if all(word.partition("=")[0] in keys for word in remedy.setting.split()):
            asked = read_overrides(remedy.setting.split())
            checked_config(Config.make({**keys, **asked}))
        with contextlib.suppress(SyntaxError):
            call = compile(remedy.setting, "a remedy", "eval")
            eval(call, {"fedbn_flwr": fedbn_flwr, "model": model, "inputs": inputs})
    if strategy in ("fedbn", "silobn", "mtfl"):
        assert mismatch.remedies[0].setting == "recalibrate=true"


ACCUSED = [
    Finding("a", "", [], {}, remedies.MISMATCH),
    Finding("b", "", [], {}, remedies.SMALL_BATCHES),
]
EVERY = [
    "recalibrate=true",
    "strategy=fixbn lr-decay-at=freeze",
    "batch-size=16",
    "norm=group",
]


@pytest.mark.parametrize(
    ("settings", "lost"),
    [
        ({}, []),
        ({"recalibrate": True}, ["recalibrate=true", "norm=group"]),
        ({"strategy": "staticbn"}, ["norm=group"]),
        ({"strategy": "fedbn"}, ["norm=group"]),
        ({"strategy": "centralized"}, ["strategy=fixbn lr-decay-at=freeze"]),
        ({"batch-size": 0}, ["batch-size=16"]),
    ],
)
def test_remedies_that_the_run_has_or_cannot_take_are_left_out(
    settings, lost: list[str]
) -> None:
    found = fitting(ACCUSED, Config.make(settings))
    left = {remedy.setting for finding in found for remedy in finding.remedies}
    assert sorted({*EVERY} - left) == sorted(lost)
    # These strategies refuse a model without BatchNorm, as recalibrate=true does.
    refuses = settings.get("strategy") in ("staticbn", "fedbn")
    assert ("strategy=fedavg norm=group" in left) == refuses


@pytest.mark.parametrize(
    ("finding", "settings", "handled"),
    [
        ("label-skew", {"strategy": "fedtan", "local-steps": 1}, True),
        # It synchronises only the first step.
        ("label-skew", {"strategy": "fedtan", "local-steps": 5}, False),
        ("label-skew", {"strategy": "fedtan"}, False),
        ("train-test-mismatch", {"recalibrate": True}, True),
        ("train-test-mismatch", {"strategy": "staticbn"}, True),
        # The first test uses the running statistics.
        ("train-test-mismatch", {"eval-on": "global,recalibrated"}, False),
    ],
)
def test_what_a_method_is_a_remedy_for(finding: str, settings, handled: bool) -> None:
    config = Config.make(settings)
    assert (finding in training_of(config).handled) == handled


def test_a_run_tested_with_batch_statistics(tmp_path, quick_config) -> None:
    config = quick_config(**{"eval-on": "global-test-bn", "test-bn": "batch"})
    run(config, tmp_path)
    first = diagnose_run(tmp_path, 100).findings[0]
    assert first.id == "tested-with-batch-statistics"
    assert "The run's first test ends in -test-bn" in first.evidence[0]


@pytest.mark.parametrize(("phase", "handled"), [("frozen", True), ("train", False)])
def test_after_t_star_small_batches_are_no_fault(
    phase: str, handled: bool, tmp_path
) -> None:
    """The run's last line shows whether training still uses batch statistics."""
    (tmp_path / "metrics.jsonl").write_text(
        f'{{"round": 1, "phase": "train"}}\n{{"round": 2, "phase": "{phase}"}}\n'
    )
    config = Config.make({"strategy": "fixbn"})
    assert ("small-batch" in training_of(config, tmp_path).handled) == handled


FROZEN = """
import torch
from torch import nn


def net(num_classes):
    layers = [nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8)]
    model = nn.Sequential(*layers, nn.Linear(8, num_classes))
    model[:3].requires_grad_(frozen)
    return model


def head(model, batches, rules, learning_rate):
    network = model[-1] if len(model) < 4 else model
    optimizer = rules.wrap(torch.optim.SGD(network[-1].parameters(), learning_rate))
    for inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return 0.0
"""


@pytest.mark.parametrize("loop", ["", "net_of_a_test:head"])
def test_a_model_that_freezes_its_layers_itself_is_named_with_the_key_that_helps(
    loop, tmp_path, monkeypatch, caplog
) -> None:
    """The run warns, and the doctor's remedy leaves neither warning nor finding."""
    code = FROZEN.replace("frozen", str(bool(loop)))
    (tmp_path / "net_of_a_test.py").write_text(code, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "net_of_a_test", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    settings = {
        "model": "net_of_a_test:net",
        "loop": loop,
        "partition": "iid",
        "local-steps": 1,
        "num-server-rounds": 1,
        "num-clients": 2,
    }

    def found(**further) -> tuple[list[Finding], list[str]]:
        caplog.clear()
        out = start(tmp_path / f"run-{len(further)}", **settings, **further)
        findings = diagnose_run(out).findings
        named = [one for one in findings if one.id == "frozen-but-moving"]
        return named, [text for text in caplog.messages if "of them (2, ...)" in text]

    with caplog.at_level("WARNING", "flwr"):
        (finding,), (warning,) = found()
        (remedy,) = finding.remedies
        assert remedy.setting == "train-only=3"
        assert "1 BatchNorm layer(s)" in warning
        assert "train_only='3'" in warning
        assert found(**read_overrides([remedy.setting])) == ([], [])
        still = {"strategy": "fixbn", "freeze-at": 0}
        assert found(**still)[0] == []


def change(file: Path, **entries) -> None:
    """Replace entries of a file by values, or by functions of its old state."""
    with safe_open(file, "pt") as opened:
        about = opened.metadata()
    state = load_file(file)
    for name, new in entries.items():
        path = name.replace("__", ".")
        state[path] = new(state) if callable(new) else new
    save_file(state, file, about)


@pytest.mark.parametrize("strategy", ["fedavg", "fedbn"])
def test_the_card_of_unfit_statistics_has_one_test(strategy: str, tmp_path) -> None:
    """A second test of fewer examples would name other sites and other accuracies."""
    settings = {**QUICK, "strategy": strategy, "num-server-rounds": 2}
    settings |= {"partition": "classes", "local-steps": 20, "bn-momentum": 0.001}
    out = start(tmp_path / "run", **settings)
    unfit = of_mismatch(out)
    assert unfit
    known = [
        f for f in diagnose_run(out, 200).findings if f.id == "train-test-mismatch"
    ]
    (card,) = known
    assert card.what == f"{unfit}."
    assert not [line for line in card.evidence if "ccuracy" in line or "Client" in line]


def test_faults_of_clients_are_named_with_all_of_them_and_shared_ones_with_none(
    tmp_path, quick_config
) -> None:
    out, below = tmp_path / "run", torch.full((30,), -1.0)
    run(quick_config(strategy="silobn", partition="iid"), out)
    change(out / "model.safetensors", fc__weight=torch.full((10, 30), torch.nan))
    for k in (1, 2):
        change(out / f"clients/client-{k}.safetensors", norm__running_var=below)
    found = [f.what for f in diagnose_run(out, 100).findings]
    unusable = "the state contains running variances below 0 or non-finite values."
    assert [what for what in found if what.startswith("Client")] == [
        f"Clients 1, 2: {unusable}"
    ]
    assert found.count(f"{unusable[0].upper()}{unusable[1:]}") == 1


WARDS = '''
import torch
from torch.utils.data import TensorDataset


def wards(site, part):
    """Four sites: site 1 has other labels, site 2 another scanner, in two columns.

    Each patient has four examples, which say as much as one.
    """
    draw = torch.Generator().manual_seed(10 * int(site) + (part == "test"))
    inputs = torch.randn(150, 5, generator=draw)
    often = 0.6 if int(site) == 1 else 0.2
    labels = (torch.rand(150, generator=draw) < often).long()
    if int(site) == 2:
        inputs[:, 3:] += torch.tensor([9.0, -4.0])
    each = torch.arange(150).repeat(4)
    data = TensorDataset(inputs[each], labels[each])
    data.groups = [f"patient {site} {at}" for at in each.tolist()]
    return data


wards.site_names = ["Nord", "Süd", "West", "Ost"]
wards.columns = ["age", "crp", "hb", "lesion", "texture"]
'''


@pytest.mark.parametrize("strategy", ["fedbn", "dp"])
def test_the_page_names_the_sites_that_differ_and_in_what(
    strategy: str, tmp_path, monkeypatch
) -> None:
    """FedBN is a remedy for other inputs, so the table is in no finding.

    The page of a run with protected clients has no table.
    """
    (tmp_path / "wards_of_a_test.py").write_text(WARDS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    settings = {
        "dataset": "wards_of_a_test:wards",
        "num-clients": 4,
        "num-server-rounds": 1,
        "strategy": strategy,
    }
    if strategy == "dp":
        settings |= {"strategy": "fedavg", "dp": "server", "num-classes": 2}
        settings["eval-on"] = "global"
    out = start(tmp_path / "run", **settings)
    examine(out)
    page = html.unescape(page_of(out))
    section = page.partition("<h2>Sites that differ</h2>")[2].partition("</section>")[0]
    found = json.loads((out / "doctor.json").read_text())
    ids = [finding["id"] for finding in found["findings"]]
    if strategy == "dp":
        assert not section
        assert "label-skew" not in ids
        assert any("protects its clients" in line for line in found["not-measured"])
        return
    rows = re.findall(r'<th scope="row">(.*?)</th>(.*?)</tr>', section, re.DOTALL)
    assert [name for name, _ in rows] == ["Süd", "West"]
    assert "class 1: 0.6" in rows[0][1]
    assert re.search(r"lesion \+\d.*, texture -\d", rows[1][1])
    assert "label-skew" in ids
    assert "feature-shift" not in ids


def test_the_steps_of_an_epoch_are_those_of_the_median_client(tmp_path) -> None:
    settings = {**CASES["label skew, E = 1"].settings, "num-server-rounds": 12}
    settings |= {"eval-every": 12, "local-steps": 0, "local-epochs": 1}
    config = Config.make({**settings, "batch-size": 200})
    run(config, tmp_path / "run")
    steps = usual_steps(config, partitioned_data(config, count_clients(config)))
    (skew,) = [
        one
        for one in diagnose_run(tmp_path / "run", 100).findings
        if one.id == "label-skew"
    ]
    assert skew.numbers["local-steps"] == steps > 0
