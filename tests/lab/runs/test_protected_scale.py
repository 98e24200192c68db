"""One mean and std under masks and under noise: against float64 by hand, with its cost, and what is refused."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.config.ranges import parse_ranges
from fedbn_flwr.lab.finished_runs.sites import sites_of_run
from fedbn_flwr.lab.runs import protected_scale as module
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.privacy.accounting import PrivacyAccountant, Release, Steps, epsilon_of_steps
from fedbn_flwr.privacy.masked_round import MaskedRound
from fedbn_flwr.training.input_scale import Scale

RANGES = "age:0:120,chol:100:600"
HOSPITALS = {"x": 30, "y": 12, "z": 21}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Three hospitals of unequal size; a missing value, and one outside the ranges."""
    draw, lines = np.random.default_rng(0), ["age,chol,hospital,part,sick"]
    for at, (name, size) in enumerate(HOSPITALS.items()):
        for row in range(size):
            age, chol = draw.normal(50 + 5 * at, 9), draw.normal(250 + 30 * at, 40)
            cell = "" if (name, row) == ("x", 3) else 700 if (name, row) == ("y", 4) else f"{chol:.1f}"
            lines.append(f"{age:.1f},{cell},{name},{'test' if row % 4 == 3 and row > 3 else 'train'},{int(age > 55)}")
    path = tmp_path / "table.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def settings(table: Path, **more: Any) -> dict[str, Any]:
    keys = {"dataset": f"csv:{table}", "label-column": "sick", "client-column": "hospital", "split-column": "part"}
    keys |= {"missing": "mean", "task": "binary", "class-names": "0,1", "feature-columns": "age,chol", "model": "mlp"}
    keys |= {"num-server-rounds": 1, "local-steps": 2, "batch-size": 8, "eval-on": "global"}
    return {**keys, "feature-ranges": RANGES, "num-clients": 3, **more}


def columns(table: Path) -> dict[str, np.ndarray]:
    """The training rows of each hospital in float32, put into the ranges."""
    found: dict[str, list[list[float]]] = {name: [] for name in HOSPITALS}
    for line in table.read_text().splitlines()[1:]:
        age, chol, name, part, _ = line.split(",")
        if part == "train":
            found[name].append([float(age), float(chol or "nan")])
    return {name: np.clip(np.float32(rows).astype(np.float64), [0, 100], [120, 600]) for name, rows in found.items()}


def scale_of_run(out: Path) -> dict[str, list[float]]:
    return json.loads((out / "scale.json").read_text())


def test_masked_sums_give_the_mean_and_deviation_of_all_records(
    table: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Up to the rounding of fixed-point numbers: m 2^(-f-1) / W of half a range in the mean."""
    run(Config.make(settings(table, **{"masked-sums": True})), tmp_path / "out")
    rows = np.concatenate([*columns(table).values()])
    found, half, total = scale_of_run(tmp_path / "out"), np.array([60.0, 250.0]), len(rows)
    error = 3 * 2.0 ** -(62 - math.ceil(math.log2(total)) + 1) / total
    assert np.abs(np.array(found["mean"]) - np.nanmean(rows, 0)).max() <= (4 * error + 1e-15) * half.max() * 2
    np.testing.assert_allclose(found["std"], np.nanstd(rows, 0), rtol=1e-11)
    assert "1 of 10 training examples have a value outside feature-ranges" in caplog.text
    plain = settings(table)
    del plain["feature-ranges"]
    table.write_text(table.read_text().replace(",700,", ",600,"))
    run(Config.make(plain), tmp_path / "plain")
    saved = [json.loads((tmp_path / name / "summary.json").read_text())["final"] for name in ("out", "plain")]
    assert saved[0]["test-loss"] == pytest.approx(saved[1]["test-loss"], rel=0.2), "the tests of the server, too"


class Fixed:
    """A noise that is known."""

    secret = True

    def normal(self, shape: Any) -> np.ndarray:
        return np.full(shape, 0.001)


@pytest.mark.parametrize(
    "who",
    [{"dp": "server"}, {"dp": "client"}, {"dp": "client", "masked-sums": True, "masked-metrics": "published"}],
    ids=["server", "client", "masked"],
)
def test_noise_of_clients_is_one_release_and_hides_one_client(
    who: dict[str, Any], table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean of the clients' means, with noise of z C in their sum; epsilon counts it with the rounds."""
    pytest.importorskip("dp_accounting")
    monkeypatch.setattr(module, "SystemNoise", Fixed)
    keys = {**who, "dp-noise-multiplier": 2.0, "standardise-noise-multiplier": 0.5, "dp-delta": 0.1}
    summary = run(Config.make(settings(table, **keys, **{"dp-metrics": "published"})), tmp_path / "out")
    found, bound = scale_of_run(tmp_path / "out"), 1.5 * math.sqrt(2)
    shift, of_clients = 0.001 * 0.5 * bound, [*columns(table).values()]
    for at, (middle, half) in enumerate(((60.0, 60.0), (350.0, 250.0))):
        u = [(rows[:, at] - middle) / half for rows in of_clients]
        count, mean = 3 + shift, sum(np.nanmean(one) for one in u) + shift
        square = sum(np.nanmean(one**2) - 0.5 for one in u) + shift
        variance = square / count + 0.5 - (mean / count) ** 2
        usable = variance > 0.5 * bound / count
        expected = (middle + half * mean / count, half * variance**0.5) if usable else (middle, half / 3**0.5)
        assert (found["mean"][at], found["std"][at]) == pytest.approx(expected, rel=1e-9)
    accountant = PrivacyAccountant(0.1, "zero-out", releases=[Release(0.5, 3, 3), Release(2.0, 3, 3)])
    assert summary["privacy"]["epsilon"] == pytest.approx(accountant.epsilon(), rel=1e-12)
    lines = (tmp_path / "out/privacy.jsonl").read_text().splitlines()
    assert [json.loads(line)["noise_multiplier"] for line in lines] == [0.5, 2.0]


def test_records_add_their_own_noise_and_it_is_counted(table: Path, tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    keys = {"record-dp": True, "norm": "layer", "record-dp-noise-multiplier": 1.0, "batch-size": 4}
    keys |= {"standardise-noise-multiplier": 3.0, "dp-delta": 1e-3}
    summary = run(Config.make(settings(table, **keys)), tmp_path / "out")
    smallest = min(map(len, columns(table).values()))
    cost = epsilon_of_steps([Steps(3.0, 1.0, 1), Steps(1.0, 4 / smallest, 2)], 1e-3)
    assert summary["privacy"]["epsilon"] == pytest.approx(cost, rel=1e-12)
    assert "after 2 releases, with that of the inputs' sums:" in summary["privacy"]["guarantee"]
    found = scale_of_run(tmp_path / "out")
    assert 0 <= found["mean"][0] <= 120
    tight = {"dp-max-epsilon": 0.5, "standardise-noise-multiplier": 0.5}
    with pytest.raises(ConfigError, match=r"standardise=federated would bring epsilon to .* before round 1"):
        run(Config.make(settings(table, **{**keys, **tight})), tmp_path / "tight")


CLIENT_NOISE = {"dp": "client", "dp-noise-multiplier": 2.0, "standardise-noise-multiplier": 0.5, "dp-delta": 0.1}
RECORD_NOISE = {"record-dp": True, "norm": "layer", "record-dp-noise-multiplier": 2.0, "batch-size": 4}
RECORD_NOISE |= {"standardise-noise-multiplier": 0.5, "dp-delta": 0.1}


class Killed(BaseException):
    """What ends a process in a test."""


def killed(*_: object) -> Scale:
    raise Killed


@pytest.mark.parametrize(
    "keys", [{"masked-sums": True}, CLIENT_NOISE, RECORD_NOISE], ids=["masks", "clients", "records"]
)
def test_a_resumed_run_asks_for_no_second_sums(
    keys: dict[str, Any], table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "masked-sums" not in keys:
        pytest.importorskip("dp_accounting")
    out = tmp_path / "out"
    run(Config.make(settings(table, **keys)), out)
    scale = (out / "scale.json").read_bytes()
    monkeypatch.setattr(module, "_nodes", killed)
    summary = run(Config.make(settings(table, **keys, **{"num-server-rounds": 2, "resume": True})), out)
    assert (out / "scale.json").read_bytes() == scale
    if "masked-sums" not in keys:
        lines = (out / "privacy.jsonl").read_text().splitlines()
        assert [json.loads(line)["noise_multiplier"] for line in lines] == [0.5, 2.0, 2.0]
        assert "after 3 releases" in summary["privacy"]["guarantee"]


def test_the_table_by_site_of_a_finished_run_has_the_scale_of_the_run(table: Path, tmp_path: Path) -> None:
    """Not that of all training examples as they are, one of which is outside the ranges."""
    summary = run(Config.make(settings(table, **{"masked-sums": True})), tmp_path / "out")
    sites = sites_of_run(tmp_path / "out")
    sizes, values = ([row[name] for row in sites] for name in ("examples", "value"))
    assert np.average(values, weights=sizes) == pytest.approx(summary["final"]["test-accuracy"])


@pytest.mark.parametrize("keys", [CLIENT_NOISE, RECORD_NOISE], ids=["clients", "records"])
def test_noisy_sums_that_a_kill_has_lost_are_counted(
    keys: dict[str, Any], table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are asked for again, with new noise: both cost, and both count in the limit."""
    pytest.importorskip("dp_accounting")
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(module, "_scale", killed)
        with pytest.raises(Killed):
            run(Config.make(settings(table, **keys)), out)
    assert not (out / "scale.json").exists()
    release = Steps(0.5, 1.0, 1)
    one, two = (epsilon_of_steps([release] * number, 0.1) for number in (1, 2))
    if "dp" in keys:
        one, two = (PrivacyAccountant(0.1, "zero-out", releases=[Release(0.5, 3, 3)] * n).epsilon() for n in (1, 2))
    limited = settings(table, **keys, **{"dp-max-epsilon": (one + two) / 2, "resume": True})
    with pytest.raises(ConfigError, match=f"would bring epsilon to {two:.4g} before round 1"):
        run(Config.make(limited), out)
    summary = run(Config.make(settings(table, **keys, resume=True)), out)
    lines = (out / "privacy.jsonl").read_text().splitlines()
    assert [json.loads(line)["noise_multiplier"] for line in lines] == [0.5, 0.5, 2.0]
    assert "after 3 releases" in summary["privacy"]["guarantee"]


@pytest.mark.parametrize("lost", [None, 0])
def test_masked_sums_that_a_kill_has_lost_are_opened_again_for_the_same_clients_alone(
    lost: int | None, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one client more or less the difference would be its own sums."""
    out, config = tmp_path / "out", settings(table, **{"masked-sums": True})
    asked, reveal, opened = module._ask, MaskedRound._reveal, []
    monkeypatch.setattr(MaskedRound, "_reveal", lambda *args: opened.append(args[1]) or reveal(*args))

    def without(number: int | None, *args: Any) -> Any:
        return {at: state for at, state in asked(*args).items() if at != number}

    with monkeypatch.context() as patch:
        patch.setattr(module, "_ask", functools.partial(without, lost))
        patch.setattr(module, "_scale", killed)
        with pytest.raises(Killed):
            run(Config.make(config), out)
    assert opened == [frozenset({0, 1, 2} - {lost})], "the sum is known"
    with monkeypatch.context() as patch:
        patch.setattr(module, "_ask", functools.partial(without, 2))
        why = "single clients, so nothing is opened" if lost is None else "1 clients have answered, 2 needed"
        with pytest.raises(ConfigError, match=why):
            run(Config.make({**config, "resume": True}), out)
    assert len(opened) == 1
    run(Config.make({**config, "resume": True}), out)
    assert opened[1] == opened[0], "the same clients, also where all are there now"
    rows = np.concatenate([*columns(table).values()][lost is not None :])
    np.testing.assert_allclose(scale_of_run(out)["mean"], np.nanmean(rows, 0), rtol=1e-12)


def test_ranges_scale_and_impute_without_a_look_at_data(table: Path, tmp_path: Path) -> None:
    """A missing value is the middle of its range; record-level privacy takes it, at no cost."""
    keys = {"record-dp": True, "norm": "layer", "record-dp-noise-multiplier": 1.0, "batch-size": 4, "dp-delta": 1e-3}
    config = Config.make(settings(table, **keys, standardise="ranges"))
    from fedbn_flwr.lab.partitioned.partitioned_data import partitioned_data

    data = partitioned_data(config, 3)
    assert data.dataset.mean == (60.0, 350.0)
    assert data.dataset.std == pytest.approx((60 / 3**0.5, 250 / 3**0.5))
    inputs = data.train_view(0).batch(torch.arange(4))[0]
    assert float(inputs[3, 1]) == 0.0
    if pytest.importorskip("dp_accounting"):
        run(config, tmp_path / "out")
        assert not (tmp_path / "out/scale.json").exists()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"masked-sums": True, "feature-ranges": ""}, "standardise=federated with privacy needs feature-ranges"),
        ({"masked-sums": True, "feature-ranges": "age:0:120"}, "no range for chol"),
        (
            {"masked-sums": True, "feature-ranges": "age:5:5,chol:x:2,sex:0:1"},
            r"'age:5:5' is no range",
        ),
        ({"standardise": "ranges", "feature-ranges": ""}, "standardise=ranges needs feature-ranges"),
        ({"dp": "server", "dp-noise-multiplier": 1.0}, "needs standardise-noise-multiplier"),
        ({"feature-ranges": RANGES}, "feature-ranges=.* has no effect"),
    ],
)
def test_what_is_refused(table: Path, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Config.make(settings(table, **keys))


def test_ranges_of_a_config() -> None:
    found = parse_ranges("a:b:0:1,*:-2.5:3", ("x", "a:b", "y"))
    assert (found.low, found.high) == ((-2.5, 0.0, -2.5), (3.0, 1.0, 3.0))
    with pytest.raises(ConfigError, match="'a' has two ranges"):
        parse_ranges("a:0:1,a:0:2", ("a",))
