"""``fedbn-flwr doctor``: a run's folder, a model with data, or a saved state; ``fedbn_flwr.doctor`` does the work."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedbn_flwr.batchnorm.averaging import average
from fedbn_flwr.batchnorm.parts import Part, split_state
from fedbn_flwr.checked_file import read_checked
from fedbn_flwr.client.saved_state import ABSENT, read_state
from fedbn_flwr.data import Subset
from fedbn_flwr.doctor.clients import ClientData
from fedbn_flwr.doctor.diagnose import diagnose_clients, diagnose_state
from fedbn_flwr.doctor.findings import Diagnosis
from fedbn_flwr.doctor.history import history
from fedbn_flwr.doctor.measured import Training
from fedbn_flwr.doctor.state_file import STATE_FILES, named, read_state_file
from fedbn_flwr.errors import ConfigError, DataError, StateError
from fedbn_flwr.experiment.config import CENTRALIZED, Config
from fedbn_flwr.experiment.output import STATISTICS_FILE, read_metrics
from fedbn_flwr.experiment.partitioned_data import PartitionedData, count_clients, partitioned_data
from fedbn_flwr.experiment.saved_model import run_config
from fedbn_flwr.experiment.setup import make_model, on_device
from fedbn_flwr.messages.protocol import KEPT
from fedbn_flwr.messages.records import tensors, to_state
from fedbn_flwr.seeds import torch_generator

__all__ = ["diagnose_model", "diagnose_run", "diagnose_saved_state", "read_names"]

State = Mapping[str, Tensor]


def diagnose_run(run: Path, max_examples: int = 1024, local_keys: Sequence[str] | None = None) -> Diagnosis:
    """Return the diagnosis of a run's folder, finished or not.

    Args:
        run: the folder.
        max_examples: examples of each client to use, drawn at random.
        local_keys: names of entries that stay with the client; None = what the run's method keeps.

    Raises:
        ConfigError: the folder has no run, or its data are not here and nothing else can be said.
        StateError: the folder has neither a model nor a checkpoint.
    """
    config = run_config(run)
    state, kept, notes = _state_of_run(run, config)
    model = make_model(config).eval()
    model.load_state_dict(state)
    training = _training(config)
    data: PartitionedData | None = None
    try:
        data = partitioned_data(config, count_clients(config))
    except DataError as error:
        notes.append(f"the data of the run are not here, so its state alone was looked at: {error}")
    found = _with_data(model, config, data, training, max_examples, local_keys, notes)
    for client, entries in kept.items():
        own = diagnose_state({**state, **entries}, model=model, training=training)
        of_client = [replace(f, what=f"Client {client}: {f.what[0].lower()}{f.what[1:]}") for f in own.findings]
        known = {(f.id, *f.evidence) for f in found.findings}
        found = replace(found, findings=[*found.findings, *(f for f in of_client if (f.id, *f.evidence) not in known)])
    lines = read_metrics(run / STATISTICS_FILE)
    if lines:
        return replace(found, measures={**found.measures, "history": history(lines)})
    missing = "changes from round to round: the run has no statistics.jsonl (watch-statistics=0)."
    return replace(found, not_measured=[*found.not_measured, missing])


def diagnose_model(
    model: str,
    dataset: str,
    settings: Mapping[str, Any],
    state: Path | None = None,
    max_examples: int = 1024,
    local_keys: Sequence[str] | None = None,
) -> Diagnosis:
    """Return the diagnosis of a model by name on a data set, split as in a run with these settings.

    Args:
        model: the config key ``model``.
        dataset: the config key ``dataset``.
        settings: further config keys: the split, E, the batch size, the method.
        state: a saved state of the model; None = its initial weights.
        max_examples: examples of each client to use, drawn at random.
        local_keys: names of entries that stay with the client in your own FedBN.
    """
    config = Config.make({**settings, "model": model, "dataset": dataset})
    built, saved = make_model(config).eval(), None
    notes = [] if state else ["the model has its initial weights: --state gives it others."]
    if state is not None:
        saved = named(read_state_file(state), built.state_dict())
        built.load_state_dict(saved)
    data = partitioned_data(config, count_clients(config))
    return _with_data(built, config, data, _training(config), max_examples, local_keys, notes, saved)


def diagnose_saved_state(
    state: Path, model: str = "", settings: Mapping[str, Any] | None = None, local_keys: Sequence[str] | None = None
) -> Diagnosis:
    """Return the diagnosis of a saved state without data; with a model's name by the types of its layers.

    Raises:
        StateError: the file cannot be read, or it is a list of arrays without names and no model is given.
    """
    entries = read_state_file(state)
    if model:
        built = make_model(Config.make({**(settings or {}), "model": model}))
        return diagnose_state(named(entries, built.state_dict()), model=built, local_keys=local_keys)
    if all(name.isdecimal() for name in entries):
        raise StateError(
            f"{state} is a list of {len(entries)} arrays without names: nothing tells which are BatchNorm's. Name the "
            "model, `fedbn-flwr doctor MODEL --state FILE`, or save with names: torch.save(model.state_dict(), path)."
        )
    return diagnose_state(entries, local_keys=local_keys)


def read_names(path: Path) -> list[str]:
    """Return the names in a file: one a line, a JSON list, or the entries of a saved state.

    Raises:
        ConfigError: the file is absent or holds no names.
    """
    if path.suffix in STATE_FILES:
        return [*read_state_file(path)]
    try:
        text = path.read_text(encoding="utf-8")
        names = json.loads(text) if text.lstrip().startswith("[") else text.split()
    except (OSError, ValueError) as error:
        raise ConfigError(f"local-keys={str(path)!r} cannot be read: {error}") from error
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"local-keys={str(path)!r} holds no names. Write one a line, or a JSON list of names.")
    return list(names)


def _with_data(
    model: nn.Module,
    config: Config,
    data: PartitionedData | None,
    training: Training,
    max_examples: int,
    local_keys: Sequence[str] | None,
    notes: Sequence[str],
    state: State | None = None,
) -> Diagnosis:
    if data is None:
        found = diagnose_state(state or model.state_dict(), model=model, local_keys=local_keys, training=training)
        return replace(found, notes=[*notes, *found.notes])
    count, size = len(data.train), config.batch_size
    plain = replace(data, augment=None)
    clients = [_examples(plain.train_view(k), str(k), size, max_examples, config.seed) for k in range(count)]
    if config.augment:
        notes = [*notes, f"examples were taken as they are, without augment={config.augment}."]
    own = [data.test_view(k) for k in range(count)]
    tests = [_examples(view, str(k), size, max_examples, config.seed) for k, view in enumerate(own) if len(view)]
    if not tests and len(whole := data.test_view()):
        tests = [_examples(whole, "test", size, max_examples * count, config.seed)]
    if not training.local_steps and config.strategy != CENTRALIZED:
        typical = statistics.median(len(part) for part in data.train)
        steps = config.local_epochs * (-(-typical // size) if size else 1)
        training = replace(training, local_steps=int(steps))
    task = config.learning_task()
    return diagnose_clients(
        on_device(model, config),
        [c for c in clients if c is not None],
        [c for c in tests if c is not None],
        loss=task.loss,
        training=training,
        state=state,
        local_keys=local_keys,
        seed=config.seed,
        notes=notes,
    )


def _examples(view: Subset, name: str, batch_size: int, max_examples: int, seed: int) -> ClientData | None:
    """Return up to ``max_examples`` random examples of a client, on the CPU; None if it has none."""
    if not len(view):
        return None
    order = torch.randperm(len(view), generator=torch_generator(seed, "doctor", name))[:max_examples]
    inputs, targets = view.batch(order.sort().values)
    size = min(batch_size or len(view), len(view))
    mixed = torch.randperm(len(order), generator=torch_generator(seed, "doctor-order", name))
    return ClientData(name, inputs.cpu()[mixed], targets.cpu()[mixed], size)


def _training(config: Config) -> Training:
    tested = config.evaluations()[0] == "global-batch-statistics"
    if config.strategy == CENTRALIZED:
        return Training(0, config.batch_size, CENTRALIZED, tested_by_batch=tested)
    method = config.method()
    return Training(
        config.local_steps,
        config.batch_size,
        config.title,
        method.freezes_bn or method.synchronises,
        bool(method.local & {Part.AFFINE, Part.STATISTICS}),
        tested,
    )


def _state_of_run(run: Path, config: Config) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]], list[str]]:
    """Return the global state of a run, what each client kept, and notes.

    Where the clients keep BatchNorm, the state holds the average of what they kept.
    """
    notes: list[str] = []
    if (run / "model.safetensors").is_file():
        state, about = read_state(run / "model.safetensors")
        absent = [part for part in Part if about.get(part) == ABSENT]
        kept = {p.stem.removeprefix("client-"): read_state(p)[0] for p in sorted((run / "clients").glob("client-*"))}
    else:
        checkpoint = _newest_checkpoint(run)
        state, kept = tensors(checkpoint["state"]), _kept_in_checkpoint(run)
        absent = [] if config.strategy == CENTRALIZED else sorted(config.method().local)
        notes.append(f"the run is not finished: its checkpoint of round {checkpoint['server_round']} was used.")
    model = make_model(config)
    parts = split_state(model)
    names = parts.select(absent)
    if names and kept:
        whole = [
            to_state({name: entries[name] for name in names}) for entries in kept.values() if {*names} <= {*entries}
        ]
        state = {**state, **tensors(average(whole, [1.0] * len(whole), parts))} if whole else state
        notes.append(
            f"{', '.join(absent)} entries stay with the clients: the plain average of {len(whole)} clients was used."
        )
    elif names:
        initial = model.state_dict()
        state = {**state, **{name: initial[name] for name in names}}
        notes.append(f"{', '.join(absent)} entries stay with the clients and are not here: initial values were used.")
    return {name: state[name] for name in parts.names}, kept, notes


def _newest_checkpoint(run: Path) -> dict[str, Any]:
    files = sorted((run / "checkpoint").glob("round-*.safetensors"), key=lambda p: int(p.stem.removeprefix("round-")))
    problems = []
    for path in reversed(files):
        try:
            return read_checked(path)
        except StateError as error:
            problems.append(str(error))
    raise StateError(f"{run} has neither model.safetensors nor a checkpoint to read. {' '.join(problems)}".strip())


def _kept_in_checkpoint(run: Path) -> dict[str, dict[str, Tensor]]:
    """Return what each client of an unfinished run kept last, where the clients share the run's disk."""
    found: dict[str, dict[str, Tensor]] = {}
    for folder in sorted((run / "checkpoint" / "clients").glob("*/partition-*")):
        for path in sorted(folder.glob("*.safetensors"), reverse=True):
            try:
                content = read_checked(path)
            except StateError:
                continue
            if KEPT in content.get("kept", {}):
                found[str(content["partition"])] = tensors(content["kept"][KEPT])
                break
    return found
