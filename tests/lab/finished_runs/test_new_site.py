"""BatchNorm for a site that did not train: the guard of ``bn=adapt`` and the clients' parts, against slow oracles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from fedbn_flwr import personal_state
from fedbn_flwr.batchnorm.client_parts import blend_weights, blended, distance
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.batchnorm.reestimation import Moments
from fedbn_flwr.errors import ConfigError, StateError
from fedbn_flwr.lab.cli import app
from fedbn_flwr.lab.finished_runs.evaluate import evaluate_run
from fedbn_flwr.lab.finished_runs.saved_model import Choice, load_model

HEAD = "a,b,hospital,sick"


def rows(name: str, healthy: int, sick: int, moved: float = 0.0) -> list[str]:
    """Rows of a hospital; the sick ones are 4 higher in ``a``, and all are ``moved`` in both columns."""
    draw = np.random.default_rng(sum(map(ord, name)))
    found = []
    for at in range(healthy + sick):
        ill = at >= healthy
        a, b = draw.normal(4.0 * ill + moved, 1), draw.normal(moved, 2)
        found.append(f"{a:.4f},{b:.4f},{name},{int(ill)}")
    return found


@pytest.fixture
def trained(tmp_path: Path, quick_run: Any) -> Any:
    """``trained(strategy, **settings)``: a run of three hospitals with as many healthy as sick patients."""

    def make(strategy: str = "fedavg", **settings: Any) -> Path:
        table = tmp_path / "table.csv"
        each = [line for name, moved in (("x", 0.0), ("y", 1.0), ("z", 3.0)) for line in rows(name, 30, 30, moved)]
        table.write_text("\n".join([HEAD, *each]) + "\n")
        keys = {"dataset": f"csv:{table}", "label-column": "sick", "client-column": "hospital", "task": "binary"}
        more = {"model": "mlp", "mlp-hidden": "6", "num-server-rounds": 20, "local-steps": 6, "learning-rate": 0.2}
        return quick_run(**{**keys, **more, "strategy": strategy, "batch-size": 16, **settings})[1]

    return make


def site(tmp_path: Path, lines: list[str]) -> dict[str, str]:
    path = tmp_path / "site.csv"
    path.write_text("\n".join([HEAD, *lines]) + "\n")
    return {"dataset": f"csv:{path}", "class-names": "0,1"}


def test_the_guard_declines_what_another_class_mix_makes_and_shows_what_it_would_have_cost(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows are in the table and in metrics.json; one is chosen, and a line says why."""
    monkeypatch.setenv("COLUMNS", "220")
    run = trained()
    mostly_healthy = site(tmp_path, rows("new", 180, 20, 1.0))
    what, found, _ = evaluate_run(run, mostly_healthy, "adapt", out=tmp_path / "out")
    by_name = {row.statistics: row for row in found if row.data == "all"}
    assert [*by_name] == ["as saved", "re-estimated", "balanced"]
    assert not by_name["re-estimated"].chosen
    (chosen,) = [row for row in by_name.values() if row.chosen]
    assert by_name["re-estimated"].result.accuracy < by_name["as saved"].result.accuracy - 0.05
    assert chosen.result.accuracy >= by_name["as saved"].result.accuracy - 0.005
    assert "bn=adapt: " in what
    metrics = json.loads((tmp_path / "out/metrics.json").read_text())
    assert {row["statistics"] for row in metrics["results"] if row["chosen"]} == {chosen.statistics}
    assert what in metrics["model"]
    arguments = ["evaluate", str(run), "--bn", "adapt", "--dataset", mostly_healthy["dataset"]]
    output = CliRunner().invoke(app, [*arguments, "--set", "class-names=0,1"]).output
    assert f"{chosen.statistics} (chosen)" in output
    other_unit = site(tmp_path, rows("new", 100, 100, -30.0))
    found = [row for row in evaluate_run(run, other_unit, "adapt")[1] if row.data == "all"]
    assert [row.statistics for row in found if row.chosen] == ["re-estimated"]
    assert found[1].result.accuracy > found[0].result.accuracy + 0.2


def test_nearest_and_blend_of_the_clients_parts_against_an_oracle(trained: Any, tmp_path: Path) -> None:
    """One BN layer after a linear one: its inputs do not depend on BN, so their statistics are known in float64."""
    run = trained("fedbn")
    data = site(tmp_path, rows("new", 30, 30, 2.6))
    saved = load_model(run, Choice(parts=True))
    (path,) = [path for path, module in saved.model.named_modules() if isinstance(module, nn.BatchNorm1d)]
    inputs: list[torch.Tensor] = []
    layer = saved.model.get_submodule(path)
    layer.register_forward_pre_hook(lambda layer, args: inputs.append(args[0].double()))  # type: ignore[arg-type]
    values = np.array([line.split(",")[:2] for line in rows("new", 30, 30, 2.6)], np.float32)
    scaled = (values - np.float32(saved.description.mean)) / np.float32(saved.description.std)
    with torch.no_grad():
        saved.model(torch.from_numpy(scaled.astype(np.float32)))
    mean, var = inputs[0].mean(0).numpy(), inputs[0].var(0, correction=0).numpy()
    parts = {k: {n: v.double().numpy() for n, v in personal_state(run, k).items()} for k in range(3)}
    apart = {}
    for k, part in parts.items():
        gaps = [
            ((m - x) ** 2 + (s**0.5 - v**0.5) ** 2) / v
            for m, s, x, v in zip(part[f"{path}.running_mean"], part[f"{path}.running_var"], mean, var, strict=True)
        ]
        apart[k] = sum(gaps) / len(gaps)
    weights = {k: 1 / d / sum(1 / e for e in apart.values()) for k, d in apart.items()}
    nearest = min(apart, key=lambda k: apart[k])
    assert len({round(d, 3) for d in apart.values()}) == 3

    def accuracy_and_loss(of: dict[int, float]) -> tuple[float, float]:
        x = torch.from_numpy(scaled.astype(np.float64))
        net = saved.model.double()
        entries = {leaf: sum(w * parts[k][f"{path}.{leaf}"] for k, w in of.items()) for leaf in ("weight", "bias")}
        center = sum(w * parts[k][f"{path}.running_mean"] for k, w in of.items())
        spread = sum(
            w * (parts[k][f"{path}.running_var"] + (parts[k][f"{path}.running_mean"] - center) ** 2)
            for k, w in of.items()
        )
        for leaf, value in {**entries, "running_mean": center, "running_var": spread}.items():
            getattr(net.get_submodule(path), leaf).data.copy_(torch.from_numpy(np.asarray(value)))
        targets = torch.tensor([float(line.split(",")[-1]) for line in rows("new", 30, 30, 2.6)]).double()
        with torch.no_grad():
            logits = net(x)[:, 0]
        loss = nn.functional.binary_cross_entropy_with_logits(logits, targets)
        return float(((logits > 0) == targets).double().mean()), float(loss)

    for bn, of, name in (("nearest", {nearest: 1.0}, f"nearest: client {nearest}"), ("blend", weights, "blend")):
        what, found, _ = evaluate_run(run, data, bn)
        plain, chosen = [row for row in found if row.data == "all"]
        assert (plain.statistics, chosen.statistics, chosen.chosen) == ("as saved", name, True)
        accuracy, loss = accuracy_and_loss(of)
        assert chosen.result.accuracy == pytest.approx(accuracy)
        assert chosen.result.loss == pytest.approx(loss, rel=1e-4)
        assert plain.result.loss == pytest.approx(accuracy_and_loss(dict.fromkeys(parts, 1 / 3))[1], rel=1e-4)
        assert "plain average of the parts of the 3 clients here" in what
        assert f"client {nearest}: {apart[nearest]:.3g} ({of[nearest]:.0%})" in what


def test_weights_and_blends_of_parts() -> None:
    """A client at distance 0 is the blend; equal parts blend to themselves; counters are left out."""
    assert blend_weights({"a": 1.0, "b": 3.0}) == pytest.approx({"a": 0.75, "b": 0.25})
    assert blend_weights({"a": 0.0, "b": 3.0, "c": 0.0}) == {"a": 0.5, "b": 0.0, "c": 0.5}
    model = nn.Sequential(nn.BatchNorm1d(3))
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    same = blended({0: state, 1: state}, {0: 0.3, 1: 0.7}, split_state(model))
    assert {*same} == {"0.weight", "0.bias", "0.running_mean", "0.running_var"}
    for name, value in same.items():
        np.testing.assert_allclose(value, state[name], rtol=1e-15)
    moments = {"0": Moments(10, torch.zeros(3).double(), 10 * torch.ones(3).double())}
    assert distance(state, moments) == 0.0
    assert distance({}, moments) == float("inf")


def test_what_does_not_fit_is_said(trained: Any, quick_run: Any, tmp_path: Path) -> None:
    run = trained()
    data = site(tmp_path, rows("new", 30, 30))
    for bn in ("nearest", "blend"):
        with pytest.raises(ConfigError, match="with strategy=fedavg they keep nothing"):
            evaluate_run(run, data, bn)
    alone = quick_run(strategy="standalone")[1]
    with pytest.raises(ConfigError, match="for methods whose clients keep BN alone"):
        evaluate_run(alone, {"dataset": "digits"}, "blend")
    kept = quick_run(strategy="fedbn")[1]
    with pytest.raises(ConfigError, match="leave out the state folder"):
        evaluate_run(kept, {"dataset": "digits"}, "blend", state_dir=tmp_path)
    for file in (kept / "clients").iterdir():
        file.unlink()
    with pytest.raises(StateError, match="none is here"):
        evaluate_run(kept, {"dataset": "digits"}, "nearest")
    one = site(tmp_path, rows("new", 1, 0))
    with pytest.raises(ConfigError, match=r"re-estimates BN statistics from two or more examples. The data have 1"):
        evaluate_run(run, one, "adapt")
