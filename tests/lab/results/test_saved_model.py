"""``load_model``: the evaluated model, with the normalisation of its inputs."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedbn_flwr.checked_file import read_checked
from fedbn_flwr.client.personal_model import (
    client_file,
    metadata,
    personal_state,
    read_state,
    site_state,
)
from fedbn_flwr.errors import ConfigError, StateError
from fedbn_flwr.lab.partitioned.partitioned_data import partitioned_data
from fedbn_flwr.lab.results.saved_model import Choice, load_model, saved_model
from tests.support.runs import config_of


@pytest.mark.parametrize("norm", ["batch", "group", "wsconv"])
def test_a_loaded_model_has_the_outputs_of_the_evaluated_one(
    norm: str, quick_run
) -> None:
    _, run = quick_run(model="lenet", norm=norm)
    data = partitioned_data(config_of(run), 3)
    positions = torch.arange(7)
    pixels = data.dataset.test.inputs[positions]
    with torch.no_grad():
        inputs, _ = data.test_view().batch(positions)
        expected = saved_model(run, Choice()).model(inputs)
        for given in (pixels, pixels.float()):
            assert torch.equal(load_model(run)(given), expected)


def test_a_site_joins_its_part_with_the_two_files_that_it_was_sent(
    quick_run, tmp_path
) -> None:
    _, run = quick_run(strategy="silobn")
    _, other = quick_run(strategy="silobn", seed=1)
    site, state_dir = tmp_path / "site", tmp_path / "state"
    site.mkdir()
    for name in ("config.yaml", "model.safetensors"):
        shutil.copy(run / name, site)

    def bring(source: Path, client: int) -> None:
        for path in (source / "checkpoint/clients").glob(f"*/partition-{client}"):
            shutil.copytree(path, state_dir / path.parent.name / path.name)

    def take(client: int | None = None) -> dict[str, torch.Tensor]:
        return load_model(site, client, state_dir=state_dir).state_dict()

    for source in (other, run):
        with pytest.raises(StateError, match="no local state of a client from the end"):
            take()
        bring(source, 1)
    expected = load_model(run, 1).state_dict()
    for found in (take(), take(1)):
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    bring(run, 2)
    with pytest.raises(ConfigError, match=r"several clients of this run: 1, 2\."):
        take()
    with pytest.raises(StateError, match="no local state of client=0"):
        take(0)


def test_averaged_bn_is_loaded_where_the_run_saved_it(quick_run) -> None:
    _, run = quick_run(strategy="fedbn", **{"eval-on": "averaged-bn"})
    assert "the average over the clients" in saved_model(run, Choice()).what
    shutil.rmtree(run / "clients")  # as over a network
    with pytest.raises(StateError, match=r"the local state of client=1 is not here"):
        load_model(run, 1)


@pytest.mark.parametrize("eval_on", ["personal-own", "averaged-bn"])
@pytest.mark.parametrize("whole", [False, True])
def test_a_site_has_what_it_keeps_whatever_the_shared_file_has(
    quick_run, eval_on: str, whole: bool
) -> None:
    _, run = quick_run(strategy="fedbn", **{"eval-on": eval_on})
    file = run / "model.safetensors"
    shared, _ = read_state(file)
    kept = [read_state(client_file(run, client))[0] for client in range(3)]
    if whole:
        every = {**{name: torch.ones_like(e) for name, e in kept[0].items()}, **shared}
        save_file(every, file, dict(metadata(run)))
        shared = every
    assert (kept[0].keys() <= shared.keys()) == (whole or eval_on == "averaged-bn")
    state_dir = run / "checkpoint/clients"
    for client in range(3):
        path = max(state_dir.glob(f"*/partition-{client}/*.safetensors"))
        content, wanted = read_checked(path), {**shared, **kept[client]}
        own = site_state(run, state_dir, client).state
        for state in (personal_state(run, client), own):
            assert state.keys() == wanted.keys()
            for name, value in state.items():
                assert torch.equal(value, wanted[name]), name
        for name, array in content["fedbn-flwr.local"].items():
            assert np.array_equal(kept[client][name].numpy(), array), name
