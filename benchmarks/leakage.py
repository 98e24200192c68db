"""What a reply tells of a client's classes, under each protection: the attack of ``class_mix_attack.py``.

    python benchmarks/leakage.py                                              # digits, some minutes on one core
    python benchmarks/leakage.py --data-dir DIR --write docs/results/privacy.md     # and MNIST

Twenty clients under Dirichlet(0.3) label skew train for some rounds; then the attacker gets what they send in the next
round. It has the test set as public data, and shadow clients, whose replies it treats as the protection treats those of
the clients. A client's class mix is the same in all rounds, so with noise there is a second row: the mean of 20 rounds,
here 20 trainings with fresh batches from the same model.
"""

from __future__ import annotations

import functools
import logging
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from class_mix_attack import ClassMixAttack, class_mix, shadow_clients
from measure import facts, table, write_block

from fedbn_flwr import global_state
from fedbn_flwr.batchnorm.averaging import State
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.data import Subset
from fedbn_flwr.lab.partitioned.partitioned_data import partitioned_data
from fedbn_flwr.lab.runs.run import preflight, run
from fedbn_flwr.lab.setup import local_training, make_model
from fedbn_flwr.messages.records import tensors, to_state
from fedbn_flwr.privacy.coordinates import Coordinates, clipped
from fedbn_flwr.privacy.noise import SystemNoise
from fedbn_flwr.seeds import numpy_generator, torch_generator
from fedbn_flwr.training import train
from fedbn_flwr.training.wrappers import load_state

CLIENTS, ALPHA = 20, 0.3
ROUNDS = 20  # whose replies an attacker averages; those of the runs in benchmarks/privacy.py
C, Z, SCALE = 0.3, (0.03, 0.1, 0.3, 1.0), 0.1
DATA: dict[str, dict[str, Any]] = {
    "digits": {"dataset": "digits", "num-server-rounds": 5, "local-epochs": 2},
    "MNIST": {"dataset": "mnist", "num-server-rounds": 5, "local-steps": 60},
}
Updates = Sequence[Mapping[str, Any]]


def main(
    data_dir: Annotated[str, typer.Option(help="Folder with MNIST; without it digits alone.")] = "",
    write: Annotated[Path | None, typer.Option(help="Page with places for the tables.")] = None,
    shadows: Annotated[int, typer.Option(help="Shadow clients; more of them make the attack better.")] = 200,
    only: Annotated[str, typer.Option(help="One of the data sets; empty = all.")] = "",
) -> None:
    """Print the tables."""
    logging.disable(logging.CRITICAL)
    for name in [name for name in DATA if only in ("", name) and (name == "digits" or data_dir)]:
        text = f"{table(HEAD, _rows(name, data_dir, shadows))}\n\n{shadows} shadow clients. {facts()}"
        print(f"{name}\n\n{text}\n")
        if write:
            write_block(write, f"leakage-{name}", text)


HEAD = ("the attacker has", "statistics", "everything else", "both")


def _rows(name: str, data_dir: str, num_shadows: int) -> list[list[str]]:
    """Return a row for each protection: the share of the class mix that each part of a reply tells."""
    settings = {**DATA[name], "partition": "dirichlet", "partition-alpha": ALPHA, "num-clients": CLIENTS}
    config = Config.make(settings | ({"data-dir": data_dir} if name != "digits" else {}))
    with tempfile.TemporaryDirectory() as folder:
        run(config, Path(folder) / "out", workers=0)
        config = preflight(config, Path(folder) / "next").config
        data = partitioned_data(config, CLIENTS)
        before = {key: value.numpy() for key, value in global_state(Path(folder) / "out").items()}
    size = int(np.median([len(own) for own in data.train]))
    public, classes = data.dataset.test.labels.numpy(), data.dataset.num_classes
    rng = numpy_generator(0, "shadows")
    shadows = shadow_clients(public, classes, number=num_shadows, examples=size, alpha=ALPHA, rng=rng)
    of_shadows = [
        _trained(config, before, Subset(data.dataset.test, own, mean=data.dataset.mean, std=data.dataset.std), f"s{i}")
        for i, own in enumerate(shadows)
    ]
    rounds = [
        [_trained(config, before, data.train_view(i), f"c{i}-{r}") for i in range(CLIENTS)] for r in range(ROUNDS)
    ]
    of_clients = rounds[0]
    mixes = np.stack([class_mix(public[own], classes) for own in shadows])
    truth = np.stack([class_mix(data.dataset.train.labels.numpy()[own], classes) for own in data.train])
    parts = split_state(make_model(config))
    mean = mean_update(of_clients)
    ways: dict[str, tuple[Updates, Updates]] = {  # what the shadow clients send, what the attacker has of the clients
        "the reply (or the sum of all replies, and all others)": (of_shadows, of_clients),
        "the average of all replies, and no other": (of_shadows, [mean] * CLIENTS),
        f"the reply, clipped to C = {C} (dp=client)": (_clipped(of_shadows), _clipped(of_clients)),
    }
    averaged = [mean_update(_clipped(of_client)) for of_client in zip(*rounds, strict=True)]
    for z in Z:  # of the sum with noise the attacker subtracts the others
        seen, known = f"the sum of clipped replies with noise, z = {z:g}, and all others", _clipped(of_shadows)
        ways[seen] = noisy(known, z), noisy(_clipped(of_clients), z)
        ways[f"the same with z = {z:g}, mean of {ROUNDS} rounds"] = noisy_mean(known, z), noisy_mean(averaged, z)
    chosen = (parts.statistics, (*parts.affine, *parts.rest), tuple(of_clients[0]))

    def share(names: Sequence[str], known: Updates, seen: Updates) -> str:
        attack = ClassMixAttack([_only(update, names) for update in known], mixes)
        return f"{attack.measure([_only(update, names) for update in seen], truth).share:.2f}"

    return [[way, *(share(names, *pair) for names in chosen)] for way, pair in ways.items()]


def _clipped(updates: Updates) -> Updates:
    return [clipped(update, C) for update in updates]


def _trained(config: Config, before: State, data: Subset, name: str) -> dict[str, Any]:
    """Return the update of a client after the next round's training, in the coordinates of differential privacy."""
    model, settings = make_model(config), local_training(config)
    load_state(model, tensors(before))
    rate = settings.learning_rate.at(config.num_server_rounds + 1)
    train(model, data, settings, learning_rate=rate, stream=functools.partial(torch_generator, config.seed, name))
    state = {key: array.copy() for key, array in to_state(model.state_dict()).items()}
    return Coordinates(before, split_state(model), SCALE).update(state)


def mean_update(updates: Updates) -> dict[str, Any]:
    """Return the mean of updates, entry by entry."""
    return {key: sum(update[key] for update in updates) / len(updates) for key in updates[0]}


def noisy(updates: Updates, z: float) -> Updates:
    """Return the updates, each with noise of deviation z C."""
    noise = SystemNoise()

    def noised(update: Mapping[str, Any]) -> dict[str, Any]:
        return {key: array + z * C * noise.normal(array.shape) for key, array in update.items()}

    return [noised(update) for update in updates]


def noisy_mean(updates: Updates, z: float) -> Updates:
    """Return means of the updates of ROUNDS rounds with the mean of their noises, which are independent."""
    return noisy(updates, z / math.sqrt(ROUNDS))


def _only(update: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: update[name] for name in names if name in update}


if __name__ == "__main__":
    typer.run(main)
