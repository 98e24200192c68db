"""Client-level differential privacy clips, adds noise, refuses and reports."""

from __future__ import annotations

import html
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    RecordDict,
)

from fedbn_flwr import global_state, to_legacy
from fedbn_flwr.batchnorm.parts import Part, split_state
from fedbn_flwr.client import torch_client
from fedbn_flwr.errors import ClientPartError, ConfigError, ReplyError, StateError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.objects_of_config import make_model
from fedbn_flwr.lab.partitioned.partitioned_data import partitioned_data
from fedbn_flwr.lab.report.page import write_report
from fedbn_flwr.lab.results.result_writer import ResultWriter
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.messages.records import from_record, to_record, to_state
from fedbn_flwr.mods import clipped_update
from fedbn_flwr.privacy import DPWrapper
from fedbn_flwr.privacy.coordinates import CLIP, Coordinates, clipped, norm
from fedbn_flwr.privacy.differential import NO_ROUND, ClientLevelDP, DPSettings
from fedbn_flwr.privacy.noise import normal
from fedbn_flwr.server.methods.method import Facts, Node, Reply
from fedbn_flwr.server.methods.phases import Phase
from fedbn_flwr.server.runs.round_report import RoundReport
from fedbn_flwr.strategies import (
    HBN,
    STRATEGIES,
    FedAvg,
    FedBN,
    FedBS,
    FedDNA,
    FedNova,
    FedTAN,
    FedTAN2,
    FixBN,
    Method,
    Scaffold,
    Standalone,
    StaticBN,
    Strategy,
    combined,
)
from tests.support.fast import fast
from tests.support.noise import repeat_noise
from tests.support.runs import lines_of
from tests.support.written_out import close

SIZES = (9, 4, 12)
IMAGES = (3, 32, 32)


class EqualMethod(Method):
    """FedAvg with equal weights for all clients."""

    name = "equal"

    def phases(self) -> tuple[Phase, ...]:
        return (Phase(weights="equal"),)


class Equal(Strategy):
    method = EqualMethod


@pytest.mark.parametrize("where", fast(["server", "client"], 1))
def test_without_noise_and_clipping_it_is_the_unprotected_run(
    federate, torchvision_net, points, where
) -> None:
    data = [points(size, client, IMAGES) for client, size in enumerate(SIZES)]
    plain, strategy = Equal(), Equal()
    DPWrapper(strategy, 0.0, 1e9, where=where)
    one, other = (
        federate(each, torchvision_net, data, rounds=2).history
        for each in (plain, strategy)
    )
    # Training amplifies a difference in the last bit.
    for server_round, error in ((1, 1e-12), (2, 1e-9)):
        counters = split_state(one[0]).counters
        right = one[server_round] | dict.fromkeys(counters, server_round)
        close(other[server_round], right, error, error)


def pooled(
    privacy: ClientLevelDP,
    before: dict[str, Any],
    states: list[dict[str, Any]],
    asked: int = 0,
    able: int = 0,
    phase: Phase = Phase(),  # noqa: B008
) -> dict[str, Any]:
    """Return the state that the method gets instead of the replies."""
    asked = asked or len(states)
    parts = split_state(before)
    facts = Facts(1, None, parts, before, phase=phase, num_able=able or asked)
    replies = [Reply(Node(i), 5.0, own, {}) for i, own in enumerate(states)]
    report = RoundReport(1, "train", asked=asked)
    (reply,) = privacy.pool(facts, report, replies)
    return dict(reply.state)


def federation(mlp, seed: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    rng, before = np.random.default_rng(seed), to_state(mlp().state_dict())
    before["1.running_var"] = rng.lognormal(0, 2, before["1.running_var"].shape)
    # NumPy turns arrays without dimensions into scalars.
    before["scale"] = np.array(0.5)

    def client() -> dict[str, Any]:
        size = rng.lognormal(0, 2)
        own = {
            n: a + size * rng.normal(size=a.shape) if a.dtype.kind == "f" else a + 9
            for n, a in before.items()
        }
        return own | {"1.running_var": before["1.running_var"] * rng.lognormal(0, 1, 4)}

    return before, [client() for _ in range(4)]


def distance(
    before: dict[str, Any], one: dict[str, Any], other: dict[str, Any]
) -> float:
    coordinates = Coordinates(before, split_state(before))
    a, b = coordinates.update(one), coordinates.update(other)
    return norm({name: a[name] - b[name] for name in a})


def test_no_neighbour_changes_the_average_by_more_than_is_stated(mlp) -> None:
    """Brute force compares the average to the average of a neighbour.

    In the neighbouring federation, a client lacks a reply or has another update, such
    as the opposite.
    """
    c, without, replaced = 0.7, [], []
    for seed in range(40):
        before, states = federation(mlp, seed)
        privacy = ClientLevelDP(DPSettings(dp="server", dp_clipping_norm=c))
        whole = pooled(privacy, before, states)
        opposite = {
            n: 2 * before[n] - a if n != "1.running_var" else a
            for n, a in states[0].items()
        }
        for other in (opposite, federation(mlp, seed + 1000)[1][0]):
            neighbour = pooled(privacy, before, [other, *states[1:]])
            replaced.append(distance(before, whole, neighbour))
        neighbour = pooled(privacy, before, states[1:], asked=4)
        without.append(distance(before, whole, neighbour))
    # The bounds are reached.
    assert 0.99 * c / 4 < max(without) <= c / 4 * (1 + 1e-9)
    assert 0.95 * 2 * c / 4 < max(replaced) <= 2 * c / 4 * (1 + 1e-9)


def test_noise_is_normal_and_new_in_every_draw() -> None:
    """test_part_of_the_layers.py measures its deviation in a run."""
    values = normal((200_001,))
    assert values.shape == (200_001,)
    assert not np.isin(values[:9], normal((200_001,))).any()
    assert len(np.unique(values)) == 200_001
    assert abs(values.mean()) < 0.012
    assert values.std() == pytest.approx(1, abs=0.01)
    assert np.mean(np.abs(values) > 1.959964) == pytest.approx(0.05, abs=0.003)
    assert abs(np.corrcoef(values[:100_000], values[100_000:200_000])[0, 1]) < 0.015


def test_clipping_by_the_clients_gives_what_clipping_by_the_server_gives(
    federate_mlp, monkeypatch
) -> None:
    states = []
    for where in ("server", "client"):
        strategy = combined(FedBN)()
        repeat_noise(monkeypatch, 1)
        DPWrapper(strategy, 0.3, 0.05, where=where)
        states.append(federate_mlp(strategy, rounds=3).state)
    close(*states, rtol=1e-9)


def test_a_client_that_clips_sends_no_number_of_its_batches(federate_mlp) -> None:
    strategy = FedAvg()
    DPWrapper(strategy, 0.3, 0.05, where="client")
    for pair in federate_mlp(strategy, rounds=1).grid.pairs():
        received, own = (from_record(one.content["arrays"]) for one in pair)
        count = "1.num_batches_tracked"
        assert own[count] == received[count]


def clipped_by_the_mod(
    kind: str, returned: dict[str, tuple[int, ...]], key: str = CLIP
) -> Any:
    """Return what is sent of entries of these shapes that an app returns."""

    def function(message, context):
        arrays = {name: np.full(shape, 5.0) for name, shape in returned.items()}
        arrays["n"] = np.array(9)
        return Message(RecordDict({"a": to_record(arrays)}), reply_to=message)

    received = to_record({"w": np.zeros(4), "n": np.array(3)})
    content = RecordDict({"a": received, "config": ConfigRecord({key: 0.5})})
    message, context = Message(content, 1, kind), Context(1, 1, {}, RecordDict(), {})
    reply = clipped_update(message, context, function)
    return from_record(reply.content["a"])


@pytest.mark.parametrize(
    ("kind", "key", "clips"),
    [
        ("train", CLIP, True),
        ("train.own", CLIP, True),
        ("evaluate", CLIP, False),
        ("train", "own", False),
    ],
)
def test_a_training_function_of_any_name_is_clipped(
    kind: str, key: str, clips: bool
) -> None:
    """A changed counter would reveal the number of batches."""
    sent = clipped_by_the_mod(kind, {"w": (4,)}, key)
    assert np.linalg.norm(sent["w"]) == pytest.approx(0.5 if clips else 10.0)
    assert sent["n"] == (3 if clips else 9)


@pytest.mark.parametrize("returned", [{"v": (4,)}, {"w": (1,)}, {"w": (2, 4)}])
def test_an_update_of_other_entries_than_received_is_not_sent(
    returned: dict[str, tuple[int, ...]],
) -> None:
    with pytest.raises(StateError):
        clipped_by_the_mod("train", returned)


def test_a_client_that_does_not_clip_is_refused_by_name(mlp) -> None:
    before, (state, *_) = federation(mlp, 0)
    facts = Facts(1, None, split_state(before), before)
    privacy = ClientLevelDP(DPSettings(dp="client", dp_clipping_norm=0.5))
    coordinates = Coordinates(before, facts.parts)
    update, _ = clipped(coordinates.update(state), 0.5)
    privacy.check(facts, Reply(Node(0), 1.0, coordinates.state(update, 0.0), {}))
    longer = {name: 1.01 * array for name, array in update.items()}
    for sent in (state, coordinates.state(longer, 0.0)):
        with pytest.raises(ClientPartError, match=r"norm .* clip it to 0\.5\. Make"):
            privacy.check(facts, Reply(Node(0), 1.0, sent, {}))


class OfAnotherProjectMethod(Method):
    """A method that may read anything in single replies."""

    name = "of-another-project"

    def aggregate(self, state, facts, replies, model):
        self.seen = [reply.metrics for reply in replies]
        return model, state


class OfAnotherProject(Strategy):
    method = OfAnotherProjectMethod


EXCHANGES = "with dp=server: .*exchanges of its first step"
REFUSED = {
    "scaffold": (Scaffold, {}, "'scaffold' with dp=server: .*control variates"),
    "fedtan": (FedTAN, {}, f"'fedtan' {EXCHANGES}"),
    "fedtan2": (FedTAN2, {}, f"'fedtan2' {EXCHANGES}"),
    "feddna": (FedDNA, {}, f"'feddna' {EXCHANGES}"),
    "fedbs": (FedBS, {}, "losses are the weights"),
    "fednova": (FedNova, {}, "divides the change of each client"),
    "staticbn": (StaticBN, {}, "collects statistics"),
    "hbn": (HBN, {}, "'hbn' with dp=server: .*single replies"),
    "standalone": (Standalone, {}, "nothing to protect"),
    "global momentum": (FedAvg, {"momentum_scope": "global"}, "momentum-scope=global"),
    "pooled variances": (FedAvg, {"variance": "pooled"}, "variance=pooled"),
    "re-estimation": (FedAvg, {"recalibrate": True}, "re-estimated"),
    "re-estimated tests": (FedAvg, {"eval_on": "recalibrated"}, "re-estimated"),
    "averaged BN": (FedBN, {"eval_on": "averaged-bn"}, "eval-on=averaged-bn"),
    "a freeze by the clients": (
        FixBN,
        {"freeze_at": "auto", "freeze_window": 2},
        "freeze-at=auto",
    ),
    "any method": (OfAnotherProject, {}, "may read anything in single replies"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_takes_more_than_an_update_is_refused_by_name(
    federate_mlp, case: str
) -> None:
    kind, settings, words = REFUSED[case]
    strategy = kind(**settings)
    DPWrapper(strategy, 0.1, 1.0)
    with pytest.raises(ConfigError, match=words):
        federate_mlp(strategy, sgd_momentum=0.9)


@pytest.mark.parametrize("name", sorted({*STRATEGIES} - {*REFUSED}))
def test_the_other_methods_are_protected(federate_mlp, wsconv_net, name: str) -> None:
    strategy = STRATEGIES[name](**({"personal": "3"} if name == "fedrep" else {}))
    DPWrapper(strategy, 0.1, 1.0)
    model = {"model": wsconv_net} if name == "fedwon" else {}
    assert federate_mlp(strategy, rounds=1, **model).reports[0].privacy


WRAPPERS = [
    (lambda run: DPWrapper(DPWrapper(FedAvg()).strategy), "has a protection already"),
    (
        lambda run: to_legacy(DPWrapper(FedAvg()).strategy, run.result.arrays),
        "works only on Flower's Message API",
    ),
    (lambda run: DPWrapper(run.strategy), "has reports of 2 unprotected rounds"),
    (lambda run: DPWrapper(FedAvg(), where="off"), "where='off' protects nothing"),
]


def test_wrappers_that_do_not_fit_are_refused(federate_mlp) -> None:
    run = federate_mlp(FedAvg(), rounds=2)
    for call, words in WRAPPERS:
        with pytest.raises(ConfigError, match=words):
            call(run)
    assert len(run.reports) == 2, "they are not lost"


def test_a_round_is_released_whoever_answers(federate_mlp, datasets) -> None:
    """All replies contain NaN, but the noise is added and counted."""
    for data in datasets:
        data.inputs *= float("nan")
    strategy = FedAvg(min_replies=3, on_divergence="continue")
    wrapper = DPWrapper(strategy, 1.0, 1.0)
    got = federate_mlp(strategy, rounds=2)
    for report in strategy.reports:
        assert (len(report.rejected), report.kept_previous) == (3, False)
    assert distance(got.history[0], got.history[1], got.history[0]) > 0.1
    assert len(wrapper.privacy.accountant.releases) == 2


def test_an_update_that_is_not_finite_in_its_units_adds_nothing(mlp) -> None:
    before, _ = federation(mlp, 0)
    before["1.running_var"] = np.full_like(before["1.running_var"], 1e-3)
    huge = {**before, "1.running_var": before["1.running_var"] + 1e308}
    got = pooled(ClientLevelDP(DPSettings(dp="server")), before, [huge, before])
    assert distance(before, got, before) == 0
    assert all(np.isfinite(array).all() for array in got.values())


def test_entries_that_no_client_trains_get_no_noise_and_may_not_change(
    mlp,
) -> None:
    before, states = federation(mlp, 0)
    fixed = ["0.weight", "1.running_mean", "1.running_var"]
    privacy = DPWrapper(FedAvg(), 1.0, fixed=fixed).privacy
    got = pooled(privacy, before, [before] * 4)
    assert all(np.array_equal(got[name], before[name]) for name in fixed)
    assert not np.array_equal(got["1.weight"], before["1.weight"])
    facts = Facts(1, None, split_state(before), before)
    changed = {**before, "0.weight": states[0]["0.weight"]}
    with pytest.raises(
        ReplyError, match=r"entry '0\.weight' changed, but no client trains it"
    ):
        privacy.check(facts, Reply(Node(0), 1.0, changed, {}))


def test_a_frozen_backbone_stays_as_it_is(tmp_path) -> None:
    quick(tmp_path, "run", train_only="fc", num_server_rounds=1)
    start = make_model(Config.make({**DIGITS, "train-only": "fc"})).state_dict()
    end = global_state(tmp_path / "run")
    entries = {name for name in start if not name.endswith("tracked")}
    moved = {name for name in entries if not np.array_equal(start[name], end[name])}
    assert moved == {"fc.weight", "fc.bias"}


def test_the_folder_of_a_run_holds_no_hash_of_what_a_client_keeps(
    tmp_path,
) -> None:
    quick(tmp_path, "run", strategy="fedbn", eval_on="global", state_dir="out")
    assert not (tmp_path / "run" / "clients").exists()
    assert b"kept-sha256" not in (tmp_path / "run" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("clip", "delta", "phase", "told"),
    [
        (1.0, 1e-5, "normal", ["running variances"]),
        (1.0, 1e-5, "frozen", []),
        (1.0, 1e-5, "no BatchNorm", []),
        (0.1, 1e-5, "normal", []),
        (0.1, 0.1, "normal", ["dp-delta=0.1"]),
        (0.1, 0.09, "normal", []),
    ],
)
def test_noise_that_ruins_the_statistics_and_a_delta_that_protects_nobody_are_told_in_the_first_round(
    clip: float, delta: float, phase: str, told: list[str], mlp, caplog
) -> None:
    settings = {"dp_noise_multiplier": 1.0, "dp_clipping_norm": clip}
    privacy = ClientLevelDP(DPSettings(dp="server", dp_delta=delta, **settings))
    still = frozenset({Part.STATISTICS}) if phase == "frozen" else frozenset()
    before = to_state(mlp(norm=phase != "no BatchNorm").state_dict())
    pooled(privacy, before, [], 5, 10, Phase(phase, frozen=still))
    for words in ("running variances", "dp-delta=0.1"):
        assert (words in caplog.text) == (words in told)


DIGITS = {
    "dp": "server",
    "dp-noise-multiplier": 1.0,
    "dataset": "digits",
    "num-clients": 4,
    "num-server-rounds": 4,
    "local-steps": 2,
    "checkpoint-every": 2,
}


def quick(tmp_path: Path, name: str, **keys: Any) -> dict[str, Any]:
    given = {key.replace("_", "-"): value for key, value in keys.items()}
    return run(Config.make(DIGITS | given), tmp_path / name, workers=0)


def test_a_run_states_epsilon_and_withholds_metrics(tmp_path) -> None:
    noise = math.sqrt(4) * dp_accounting.get_sigma_gaussian(5.0, 1e-5)
    summary = quick(tmp_path, "run", dp_noise_multiplier=noise)
    lines = lines_of(tmp_path / "run")
    assert summary["privacy"]["epsilon"] == lines[-1]["epsilon"]
    assert lines[-1]["epsilon"] == pytest.approx(5.0)
    assert lines[0]["epsilon"] < lines[1]["epsilon"]
    assert all(line["delta"] == 1e-5 and line["clipping-norm"] == 1.0 for line in lines)
    assert not any(key.startswith("train-") for line in lines for key in line)
    assert summary["privacy"]["guarantee"].startswith(
        f"epsilon = {lines[-1]['epsilon']:.4g} at delta = 1e-05 after 4 releases"
    )


def test_rounds_that_a_resumed_run_repeats_are_counted_again(
    tmp_path, monkeypatch
) -> None:
    original = ResultWriter.test

    def killed(self: Any, server_round: int, arrays: ArrayRecord) -> Any:
        if server_round == 3:
            # after the release of round 3, while the checkpoint is from round 2
            raise KeyboardInterrupt
        return original(self, server_round, arrays)

    monkeypatch.setattr(ResultWriter, "test", killed)
    with pytest.raises(KeyboardInterrupt):
        quick(tmp_path, "run")
    monkeypatch.setattr(ResultWriter, "test", original)
    summary = quick(tmp_path, "run", resume=True)
    assert "after 5 releases" in summary["privacy"]["guarantee"]
    whole = quick(tmp_path, "whole")
    assert summary["privacy"]["epsilon"] > whole["privacy"]["epsilon"]


def test_without_noise_nothing_is_guaranteed(mlp, tmp_path) -> None:
    """A later run that continues from such a release guarantees nothing either."""
    file = tmp_path / "privacy.jsonl"
    first = ClientLevelDP(DPSettings(dp="server"), file)
    pooled(first, *federation(mlp, 0))
    settings = DPSettings(dp="server", dp_noise_multiplier=4.0)
    loaded = ClientLevelDP(settings)
    loaded.load_state_dict(first.state_dict())
    assert ClientLevelDP(settings).guarantee() == NO_ROUND
    for privacy in (first, loaded, ClientLevelDP(settings, file=file)):
        assert not privacy.guarantees
        assert privacy.guarantee().startswith("No privacy is guaranteed: ")
        assert "epsilon" not in privacy.outcome()["privacy"]


def test_no_file_to_give_away_holds_what_a_client_reported(
    tmp_path, monkeypatch
) -> None:
    """No file but the checkpoints contains a client's loss or error."""
    original, loss = torch_client.train, 0.7318284590452353

    def planted(model, data, *args, **kwargs):
        result = original(model, data, *args, **kwargs)
        if len(data) == smallest:
            raise ValueError("PLANTED-ERROR")
        return replace(result, loss=loss)

    config = Config.make({**DIGITS, "partition": "dirichlet"})
    smallest = min(len(own) for own in partitioned_data(config, 4).train)
    monkeypatch.setattr(torch_client, "train", planted)
    run(config, tmp_path / "run", workers=0)
    traces = [np.array(loss, kind).tobytes() for kind in ("f4", "f8")]
    traces += [b"PLANTED-ERROR", b"0.731828"]
    names = set()
    for p in (tmp_path / "run").rglob("*"):
        if p.is_file() and "checkpoint" not in p.parts:
            assert [trace for trace in traces if trace in p.read_bytes()] == [], p
            names.add(p.name)
    assert names >= {"model.safetensors", "metrics.jsonl", "summary.json"}
    text = write_report(tmp_path / "run").read_text()
    assert "epsilon = " in text
    assert "whether a client's update" in html.unescape(text)
