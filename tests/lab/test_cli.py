"""Exit codes, help with examples, lists and the commands run and sweep."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
import typer
from typer.models import TyperPath

from fedbn_flwr.errors import (
    ConfigError,
    DataError,
    EngineError,
    NormLayerError,
    StateError,
)
from fedbn_flwr.lab.cli import app
from fedbn_flwr.lab.cli.console import (
    Scores,
    _Terminated,
    exit_codes,
    progress,
    say,
    say_table,
)
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.data import DATASETS, FUNCTION_FORM, KINDS, PARTITIONS
from fedbn_flwr.lab.models import MODELS
from fedbn_flwr.lab.partitioned.partitioned_data import partitioned_data
from fedbn_flwr.norms import NORMS
from fedbn_flwr.strategies import STRATEGIES
from tests.support import commands
from tests.support.runs import page_of, summary_of
from tests.support.tables import table

FORMS = (*KINDS.values(), FUNCTION_FORM)
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
ROUNDS = ["num-server-rounds=5", "num-clients=2", "local-steps=1"]
SMALL = ["num-server-rounds=2", *ROUNDS[1:], "batch-size=4"]


@pytest.fixture(autouse=True)
def _wide(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")


def call(*arguments: object, sets: Sequence[str] = ()):
    words = [word for setting in sets for word in ("--set", setting)]
    return commands.call(*arguments, *words)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_that_parses_and_a_text_for_each_option(
    command: str, monkeypatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    result = call(command, "--help")
    assert result.exit_code == 0
    (example,) = re.findall("Example: (fedbn-flwr .*)", result.output)
    words = example.split()
    assert words[1] == command
    parsed = COMMANDS[command]
    parsed.make_context(command, words[2:], resilient_parsing=False)
    for parameter in parsed.params:
        assert parameter.help, parameter.name
        assert parameter.help in result.output, parameter.name


@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_may_begin_with_a_tilde(command: str, tmp_path, monkeypatch) -> None:
    """No shell replaces the tilde in ``--out=~/runs``."""
    monkeypatch.setenv("HOME", str(tmp_path))
    parsed = COMMANDS[command]
    words, given = [], []
    for parameter in parsed.params:
        is_path = isinstance(parameter.type, TyperPath)
        if is_path:
            given.append(parameter.name)
        if is_path or parameter.required:
            if parameter.param_type_name == "option":
                words.append(parameter.opts[0])
            other = "models" if parameter.name == "kind" else "digits"
            words.append("~/x" if is_path else other)
    context = parsed.make_context(command, words)
    here = str(tmp_path / "x")
    for name in given:
        assert context.params[name] in (here, (here,)), name


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("strategies", [*STRATEGIES, "centralized"]),
        ("norms", [*NORMS]),
        ("models", [*MODELS]),
        ("datasets", [*DATASETS, *(form.split(",")[0] for form in FORMS)]),
        ("partitions", [*PARTITIONS]),
    ],
)
def test_list_prints_one_line_each(kind: str, names: list[str]) -> None:
    result = call("list", kind)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert [line.split()[0] for line in lines] == names
    assert all(len(line.split("  ")) >= 3 for line in lines), "name, what, source"


def test_partition_counts_the_training_examples_of_the_run(tmp_path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("{partition: classes, classes-per-client: 3, num-clients: 9}")
    result = call("partition", path, sets=["num-clients=4"])
    assert result.exit_code == 0, result.output
    counts, title, head, *rows = result.output.strip().splitlines()
    assert counts.startswith("digits: classification, 1,438 training, 359 test")
    assert title == "training examples by class"
    assert head.split() == ["client", *map(str, range(10)), "all"]
    split = partitioned_data(Config.load(path), 4)
    targets = split.dataset.train.targets
    for client, (row, own) in enumerate(zip(rows[:-1], split.train, strict=True)):
        of_client = torch.bincount(targets[own], minlength=10).tolist()
        assert row.split() == [str(one) for one in (client, *of_client, len(own))]
        assert sum(map(bool, of_client)) == 3


def test_partition_shows_the_warnings_of_a_run(
    monkeypatch,
) -> None:
    keys = ["num-clients=3", "classes-per-client=2", "partition=classes"]
    lacking = call("partition", sets=keys)
    assert (
        "warning: 4 of 10 classes have no client (2, 5, 8, 9): their 571 training"
        " examples are not used" in (lacking.output)
    )
    client = np.array([0] * 39 + [1])
    y = np.arange(40) % 2
    dataset = table(monkeypatch, np.ones((40, 2)), y, client, np.arange(40) < 9)
    result = call("partition", sets=[f"dataset={dataset}", "num-clients=2"])
    lines = result.output.splitlines()
    assert [line for line in lines if line.startswith("warning: ")] == [
        "warning: client 1 has 1 training example, so BatchNorm gets no variance from"
        " it",
        "warning: no test examples at client 1. Means over the clients' own tests leave"
        " such clients out",
    ]
    assert "examples by group" not in result.output, "the first line has the names"


DOMAINS = ("dataset=digits-domains", "num-clients=4")


@pytest.mark.parametrize(
    ("words", "sets", "named"),
    [
        (["run", "--sett", "a=1"], [], "--sett"),
        (["run"], ["sed=1"], "key 'sed'. Did you mean 'seed'? [unknown-key]\n"),
        (["list"], [], ""),
        (["list", "strategy"], [], "strategies"),
        (["sweep"], [], ""),
        (["fly"], [], "fly"),
        (["partition"], ["strategy=fedbnn"], "'fedbn'"),
        (["partition"], ["model=resnet18"], "'torchvision:resnet18'"),
        (["partition"], ["norm=grup"], "'group'"),
        (["partition"], ["partition=naturl"], "'natural'"),
        (["partition"], ["partition=natural"], "'natural'"),
        (["partition"], [*DOMAINS, "partition=natural"], "num-clients=5"),
        (["partition"], [*DOMAINS, "partition=domain"], "5 domains"),
    ],
)
def test_bad_usage_ends_with_2_and_a_word_of_advice(
    words: list[str], sets: list[str], named: str
) -> None:
    result = call(*words, sets=sets)
    assert (result.exit_code, result.stdout) == (2, "")
    assert named in result.stderr


def test_run_of_a_file(tmp_path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "{strategy: fedbn, num-clients: 2, num-server-rounds: 9, local-steps: 1,"
        " batch-size: 4}"
    )
    out = tmp_path / "out"
    result = call("run", path, "--out", out, sets=["num-server-rounds=2"])
    assert result.exit_code == 0, result.output
    assert f"results: {out}" in result.stdout
    summary = summary_of(out)
    assert (summary["strategy"], summary["rounds"]) == ("fedbn", 2)
    assert summary["model-note"].startswith(
        "model.safetensors has no affine, statistics, counters entries"
    )
    page = html.unescape(page_of(out))
    (verdict,) = re.findall(r"^Mean test accuracy of 2 sites: .*$", result.stdout, re.M)
    assert verdict in page, "the page has the same numbers"
    assert result.stdout.endswith(f"next: fedbn-flwr report {out}\n")


def test_out_in_the_config_and_by_default(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("run", sets=[*SMALL, "out=mine"]).exit_code == 0
    assert (tmp_path / "mine" / "summary.json").is_file()
    assert call("run", sets=SMALL).exit_code == 0
    (made,) = (tmp_path / "runs").iterdir()
    assert made.name.endswith("-fedavg")


def interrupt_in_round(number: int, monkeypatch) -> None:
    """Press Ctrl-C while this round's line is shown."""

    def pressed(self: Scores, line: Mapping) -> None:
        if line["round"] == number:
            raise KeyboardInterrupt

    monkeypatch.setattr(Scores, "after", pressed)


def test_an_interrupted_run_says_what_is_saved_and_how_to_go_on(
    tmp_path, monkeypatch
) -> None:
    resume = "Continue with: fedbn-flwr run --out '{}' --resume"
    anew = "It cannot be continued. Start a new run in another folder."
    for name, at, every, saved, advice in (
        ("bare", 1, 0, "no checkpoint", anew),
        ("my run", 3, 2, "a checkpoint of round 2", resume),
    ):
        interrupt_in_round(at, monkeypatch)
        out = tmp_path / name
        sets = [*ROUNDS, f"checkpoint-every={every}"]
        result = call("run", "--out", out, sets=sets)
        assert result.exit_code == 130
        assert result.stderr.strip().splitlines()[-2:] == [
            f"interrupted. Saved in {out}: the results of round {at} of 5, and {saved}.",
            advice.format(out),
        ]
    monkeypatch.undo()
    path = tmp_path / "longer.yaml"
    path.write_text("{num-server-rounds: 6, num-clients: 2, local-steps: 1}")
    assert call("run", path, "--out", out, "--resume").exit_code == 0
    summary = summary_of(out)
    assert (summary["resumed-after"], summary["rounds"]) == ([2], 6)


def test_without_a_terminal_a_round_is_a_line(
    capsys,
) -> None:
    with progress(10, "slow") as show:
        show({"round": 1, "train-loss": 1.0, "test-accuracy": 0.5})
        show({"round": 2, "train-loss": 0.9})
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "round 1/10: loss 1.0000 acc 0.5000",
        "round 2/10: loss 0.9000 acc 0.5000",
    ]


def test_a_sweep_that_is_interrupted_and_resumed(tmp_path, monkeypatch) -> None:
    study = tmp_path / "study.yaml"
    base = "{num-clients: 2, num-server-rounds: 9, local-steps: 1, batch-size: 4}"
    methods = "{A: {strategy: fedavg}, B: {strategy: fedprox}}"
    splits = "{one: {num-server-rounds: 8}, other: {partition: iid}}"
    study.write_text(f"name: two\nbase: {base}\nmethods: {methods}\nsplits: {splits}\n")
    out = tmp_path / "out"
    interrupt_in_round(1, monkeypatch)
    words = ("sweep", study, "--out", out, "--rounds", 1, "--workers", 0)
    result = call(*words)
    assert result.exit_code == 130
    assert "The same command resumes" in result.stderr
    monkeypatch.undo()
    monkeypatch.setenv("COLUMNS", "200")
    result = call(*words)
    assert result.exit_code == 0, result.output
    assert not [*out.rglob("checkpoint")], "of finished runs"
    assert re.search(
        r"^one +A +test-accuracy, % +\d+\.\d +1 ", result.stdout, re.MULTILINE
    )
    assert "|" not in result.stdout
    assert f"next: fedbn-flwr report {out}\n" in result.stdout
    for split in ("one", "other"):
        assert re.search(f"^{split}: [AB] has the best", result.stdout, re.MULTILINE)
    assert "4/4 B/other/seed-0: loss " in result.stderr
    assert summary_of(out / "A/one/seed-0")["rounds"] == 1
    study.write_text("name: wrong\nmethods: {A: {strategy: fedbnn}}\n")
    refused = call("sweep", study, "--out", tmp_path / "other")
    assert refused.exit_code == 2
    assert "A/all/seed-0: unknown strategy 'fedbnn'. Did you mean" in refused.stderr
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (KeyboardInterrupt, 130),
        (_Terminated, 143),
        (ConfigError, 2),
        (DataError, 2),
        (NormLayerError, 2),
        (EngineError, 1),
        (StateError, 1),
    ],
)
def test_each_error_has_its_exit_code(kind: type[BaseException], code: int) -> None:
    with pytest.raises(typer.Exit) as ended, exit_codes():
        raise kind("a text")
    assert ended.value.exit_code == code


def test_a_row_of_a_table_is_a_line_of_a_file(capsys) -> None:
    say_table(["site", "value"], [["a long name " * 20, "0.5"]] * 3)
    assert len(capsys.readouterr().out.splitlines()) == 4


@pytest.mark.parametrize("name", [":hospital: A", "[red]", "t:ok:", "[/x]"])
def test_a_name_is_printed_as_it_is(name: str, capsys) -> None:
    """Rich reads such texts as emoji and styles."""
    say(name)
    assert capsys.readouterr().out == f"{name}\n"
