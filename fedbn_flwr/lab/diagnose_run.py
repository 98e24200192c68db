"""The command ``fedbn-flwr doctor`` for a run.

``fedbn_flwr.doctor`` does the work. This module passes it the model, the data and the
settings of the training, and fits its remedies to the settings.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedbn_flwr.batchnorm.averaging import average
from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.client.personal_model import ABSENT, read_state
from fedbn_flwr.doctor.clients import ClientExamples
from fedbn_flwr.doctor.data_rules import clients_named
from fedbn_flwr.doctor.diagnose import diagnose_clients, diagnose_state
from fedbn_flwr.doctor.findings import Diagnosis, Finding, number_of
from fedbn_flwr.doctor.measured import Training
from fedbn_flwr.doctor.remedies import DIVERGED, MISMATCH, MISMATCH_OF_UNMOVED
from fedbn_flwr.doctor.state import TensorState
from fedbn_flwr.errors import ConfigError, DataError, FedBNError, StateError
from fedbn_flwr.lab.config import (
    CENTRALIZED,
    Config,
    data_of,
    method_of,
    read_overrides,
)
from fedbn_flwr.lab.data import Subset
from fedbn_flwr.lab.objects_of_config import initialise, make_model, on_device
from fedbn_flwr.lab.partitioned.counts import names_of, usual_steps
from fedbn_flwr.lab.partitioned.partitioned_data import count_clients, partitioned_data
from fedbn_flwr.lab.report.words import of_mismatch
from fedbn_flwr.lab.results.columns import column_names
from fedbn_flwr.lab.results.files import command, read_metrics
from fedbn_flwr.lab.results.run_files import RunFiles, run_warnings
from fedbn_flwr.lab.results.same_data import has_other_data
from fedbn_flwr.lab.results.saved_model import run_config
from fedbn_flwr.lab.results.summary import ModelDescription
from fedbn_flwr.lab.results.tests_table import site_names_of
from fedbn_flwr.lab.runs.check_start import checked_config
from fedbn_flwr.machine import threads
from fedbn_flwr.messages.records import tensors, to_state
from fedbn_flwr.messages.site_names import with_name
from fedbn_flwr.server.methods.params import TEST_BN
from fedbn_flwr.training.model_state import load_state
from fedbn_flwr.training.randomness import torch_generator
from fedbn_flwr.training.state_file import tensors_by_name


def diagnose_run(run: Path, max_examples: int = 1024) -> Diagnosis:
    """Return the diagnosis of a run's folder.

    Args:
        run: the folder.
        max_examples: examples of each client to use, drawn at random.

    Raises:
        ConfigError: the folder has no run; or the run's data are not here and its state
            shows no fault; or the data have changed since the run.
        StateError: the run is not finished.
    """
    config = run_config(run)
    if has_other_data(run, config):
        raise ConfigError(
            f"dataset={config.dataset!r} has changed since the run in {run}, so its"
            " figures would describe other examples. Restore the data, or check only"
            f" the state: {command('doctor', run / 'model.safetensors')}"
        )
    state, kept, notes = _state_of_run(run, config)
    model = make_model(config).eval()
    initial = {}
    with suppress(FedBNError):  # the file of init may be elsewhere
        initialise(model, config)
        initial = {name: entry.clone() for name, entry in model.state_dict().items()}
    load_state(model, state)
    local = method_of(config).methods.local
    training = replace(training_of(config, run), initial=initial)

    # Measure on the run's data. If the data are not on this machine, check only the
    # state.
    clients, tests = list[ClientExamples](), list[ClientExamples]()
    names = site_names_of(run)
    try:
        if ":" in config.task:
            raise DataError(f"task={config.task} is a task of your own")
        clients, tests, steps = _examples_of(config, max_examples, notes, names)
        training = replace(training_of(config, run, steps), initial=initial)
    except DataError as error:
        why = "" if ":" in config.task else "the data of the run are not here, so "
        notes.append(f"{why}only its state was checked: {error}")
        diagnosis = diagnose_state(state, model=model, training=training)
        diagnosis = replace(diagnosis, notes=notes)
    else:
        diagnosis = _with_data(
            model,
            config,
            clients,
            tests,
            training=training,
            state=state,
            notes=notes,
        )

    # A fault of one client may cause findings about all clients, so the findings about
    # single clients come first.
    own = _named(kept, names)
    findings = _of_clients(model, own, diagnosis.findings)
    findings += diagnosis.findings
    unfit = of_mismatch(run)
    if unfit:
        # The single predictions of the whole test prove it, so leave out the test of the
        # sample, but not the layer. The causes come before it.
        known = [one for one in findings if one.id == "train-test-mismatch"]
        evidence = [line for one in known for line in one.evidence[1:]]
        # FixBN would replace a method whose statistics stay with the clients.
        tries = MISMATCH_OF_UNMOVED if Part.STATISTICS in local else MISMATCH
        fault = Finding("train-test-mismatch", f"{unfit}.", evidence, {}, tries)
        findings = [*(one for one in findings if one not in known), fault]
    files = RunFiles.read(run)
    if files.diverged_at:
        evidence = [f"In round {files.diverged_at}: {files.divergence}."]
        numbers = {"round": files.diverged_at}
        diverged = Finding("diverged", "The run diverged.", evidence, numbers, DIVERGED)
        findings.insert(0, diverged)
    notes = [*run_warnings(files), *diagnosis.notes]
    return replace(diagnosis, findings=fitting(findings, config), notes=notes)


def examine(folder: Path) -> None:
    """Write the diagnosis of a finished run as ``doctor.json``, for the report.

    A file that is newer than the run's summary stays. If the doctor cannot check the
    run, the file contains the reason. In other folders, such as folders of studies,
    nothing is written.
    """
    run, file = folder / "summary.json", folder / "doctor.json"
    if not run.is_file():
        return
    if file.is_file() and file.stat().st_mtime_ns >= run.stat().st_mtime_ns:
        return
    try:
        diagnosis = diagnose_run(folder).to_json()
    except FedBNError as error:
        if error.code == "not-trusted":
            raise
        diagnosis = {"findings": [], "not-measured": [str(error)]}
    # The folder of a finished run may be read-only. The doctor then leaves no file.
    with suppress(OSError):
        write_atomically(file, json.dumps(diagnosis, indent=2) + "\n")


def _of_clients(
    model: nn.Module, kept: Mapping[str, TensorState], known: Sequence[Finding]
) -> list[Finding]:
    """Return the faults in the clients' local entries, without the known faults.

    If several clients have an equal fault, it is one finding that names the clients.
    """
    # A fault in a shared entry belongs to the model, not to a client. Replace these
    # entries by 1, so that only the client's own entries can cause a finding.
    sound = {}
    for name, value in tensors_by_name(model.state_dict()).items():
        sound[name] = value.cpu()
        if value.is_floating_point():
            sound[name] = torch.ones_like(sound[name])

    faults = {}
    clients_of: dict[tuple[str, ...], list[str]] = {}
    for client, entries in kept.items():
        for finding in diagnose_state({**sound, **entries}, model=model).findings:
            key = (finding.id, *finding.evidence)
            faults[key] = finding
            clients_of.setdefault(key, []).append(client)
    for finding in known:
        faults.pop((finding.id, *finding.evidence), None)

    named = []
    for key, finding in faults.items():
        clients = clients_of[key]
        what = f"{clients_named(clients)}: {finding.what[0].lower()}{finding.what[1:]}"
        numbers = {**finding.numbers, "clients": clients}
        named.append(replace(finding, what=what, numbers=numbers))
    return named


def fitting(findings: Sequence[Finding], config: Config) -> list[Finding]:
    """Return the findings, each with only the remedies that fit a run's settings.

    A remedy fits if the run can start with its settings and does not have them yet. If
    a remedy has two settings and they do not fit together, it keeps only the first
    setting. Settings of the run that the remedy makes useless get their defaults. If
    the run's settings cannot be checked, all remedies stay.
    """
    settings = {**config.to_mapping(), "resume": False}
    settings["out"] = settings["out"] or "out"
    try:
        checked_config(Config.make(settings))
    except FedBNError:
        # The settings cannot be checked, for example because own data are not on this
        # machine. Keep all remedies.
        return [*findings]
    fitted = []
    for finding in findings:
        remedies = []
        for remedy in finding.remedies:
            setting = _first_that_fits(remedy.setting, settings, config)
            if setting:
                remedies.append(replace(remedy, setting=setting))
        fitted.append(replace(finding, remedies=remedies))
    return fitted


def _first_that_fits(setting: str, settings: dict[str, Any], config: Config) -> str:
    """Return the first form of a remedy's setting that fits the run, or "".

    The forms are the whole setting, its first word, and ``norm`` and ``train-only``
    with FedAvg, each with the tests of the run, or else with the default tests. A
    remedy that is a call or a sentence always fits.
    """
    if not all(word.partition("=")[0] in settings for word in setting.split()):
        return setting
    ways = [setting, setting.split()[0]]
    if setting.startswith(("norm=", "train-only=")):
        # The run's method may need BatchNorm that trains, but FedAvg does not.
        ways.append(f"strategy=fedavg {setting}")
    tests = settings["eval-on"]
    for way, tested in itertools.product(ways, dict.fromkeys((tests, ""))):
        found = _fitted(way, {**settings, "eval-on": tested}, settings, config)
        if found:
            return found
    return ""


def _fitted(
    setting: str, shared: dict[str, Any], settings: Mapping[str, Any], config: Config
) -> str:
    """Return a setting that a run can start with and does not have yet, or "".

    Args:
        setting: the settings of a remedy.
        shared: the settings of the run to use with it, maybe with other tests.
        settings: the settings of the run.
        config: the same settings.
    """
    asked = read_overrides(setting.split())
    try:
        then, _ = Config.make_of_shared(shared, asked)
        checked_config(then)
    except FedBNError:
        return ""
    found = then.to_mapping()
    if all(settings[key] == found[key] for key in asked):
        return ""
    # With batch-size=0, a batch has all examples of a client. No other batch size is
    # larger. Another method would need the clients that this run has pooled.
    pools = config.strategy == CENTRALIZED != then.strategy
    if pools or (then.batch_size and not config.batch_size):
        return ""
    # Name the settings of the run that must return to their defaults.
    for key, value in found.items():
        if key not in asked and value != settings[key]:
            shown = value if isinstance(value, str) else json.dumps(value)
            setting += f" {key}={shown}"
    return setting


def _with_data(
    model: nn.Module,
    config: Config,
    clients: list[ClientExamples],
    tests: list[ClientExamples],
    **options: Any,
) -> Diagnosis:
    loss = data_of(config).task.loss
    # Use as many threads as the training, because the last digits depend on their
    # number.
    with threads(config.torch_threads):
        return diagnose_clients(
            on_device(model, config),
            clients,
            tests,
            loss=loss,
            seed=config.seed,
            **options,
        )


def _named(
    kept: Mapping[str, TensorState], names: Mapping[str, str]
) -> dict[str, TensorState]:
    """Return each client's local entries, by its number and name as one text."""
    return {with_name(client, names.get(client)): kept[client] for client in kept}


def _examples_of(
    config: Config, max_examples: int, notes: list[str], names: dict[str, str]
) -> tuple[list[ClientExamples], list[ClientExamples], int]:
    """Return training and test examples of each client, and E, see ``usual_steps``.

    The examples are without augmentation.

    Args:
        config: the settings.
        max_examples: examples of each client to use, drawn at random.
        notes: receives a sentence if the training augments its examples.
        names: receives the clients' names in the data, if it lacks a client.

    Raises:
        DataError: the data are not here.
    """
    data = partitioned_data(config, count_clients(config))
    if config.augment:
        notes.append(f"examples were used without augment={config.augment}.")
    data = replace(data, augment=None)
    names |= {**names_of(data), **names}
    clients = range(len(data.train))
    train = {str(k): data.train_view(k) for k in clients}
    test = {str(k): data.test_view(k) for k in clients}
    if not any(map(len, test.values())):
        test = {"all": data.test_view()}
    return (
        _drawn(config, train, max_examples, names),
        _drawn(config, test, max_examples, names),
        usual_steps(config, data),
    )


def _drawn(
    config: Config,
    views: Mapping[str, Subset],
    max_examples: int,
    names: Mapping[str, str],
) -> list[ClientExamples]:
    """Return up to ``max_examples`` random examples of each client, on the CPU.

    A client without examples is left out.
    """
    drawn, columns = [], column_names(config.dataset)
    for client, view in views.items():
        if not len(view):
            continue
        which = torch_generator(config.seed, "doctor", client)
        places = torch.randperm(len(view), generator=which)[:max_examples]
        # Read the examples in the order of the data, and shuffle them afterwards.
        places = places.sort().values
        inputs, targets = view.batch(places)
        order = torch_generator(config.seed, "doctor-order", client)
        mixed = torch.randperm(len(places), generator=order)
        size = min(config.batch_size or len(view), len(view))
        name, units = with_name(client, names.get(client)), view.units
        drawn.append(
            ClientExamples(
                name,
                inputs.cpu()[mixed],
                targets.cpu()[mixed],
                size,
                columns=columns,
                units=None if units is None else units.cpu()[places][mixed],
            )
        )
    return drawn


def training_of(config: Config, run: Path | None = None, steps: int = 0) -> Training:
    """Return a description of the training with these settings, for the doctor.

    Args:
        config: the settings.
        run: the folder of a run; it shows whether the run has frozen its statistics.
        steps: the local steps of a round, see ``usual_steps``; 0 if they are unknown.
    """
    method = method_of(config)
    tested = method.tests[0].endswith(TEST_BN)
    methods = method.methods
    steps = config.local_steps or steps
    if not steps and not config.batch_size:
        # With batch-size=0, an epoch is one step. Otherwise the number of steps depends
        # on the client, and 0 means unknown.
        steps = config.local_epochs

    # Collect the findings that the method already remedies.
    handled = set[str]()
    # FedTAN synchronises only the first of several local steps.
    synchronised = methods.all_phases.exchanges and steps == 1
    if methods.freezes_bn or synchronised:
        handled |= {"label-skew"}
    if run and methods.freezes_bn and Part.STATISTICS in methods.all_phases.frozen:
        lines = read_metrics(run / "metrics.jsonl")
        # After the freeze, training and test normalise by the same statistics.
        if lines and lines[-1]["phase"] == "frozen":
            handled |= {"small-batch", "train-test-mismatch"}
        if {line["phase"] for line in lines} == {"frozen"}:
            handled |= {"frozen-but-moving"}
    if Part.STATISTICS in methods.local:
        handled |= {"feature-shift", "train-test-mismatch"}
    if methods.reestimates:
        handled |= {"train-test-mismatch", "unmoved-statistics"}
    if Part.REST in methods.local:
        handled |= {"label-skew"}
    return Training(
        steps,
        config.batch_size,
        config.strategy,
        frozenset(handled),
        tested,
        config.protected,
    )


def _state_of_run(
    run: Path, config: Config
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]], list[str]]:
    """Return the global state of a run, each client's local entries, and notes.

    If the clients keep BatchNorm, the state contains the average of their entries.
    """
    if not (run / "model.safetensors").is_file():
        raise StateError(
            f"{run} has no model.safetensors, so the run is not finished. Continue it"
            " with --resume."
        )
    state, about = read_state(run / "model.safetensors")
    notes = []
    changed = ModelDescription.read(about).code_changed()
    if changed:
        notes.append(changed)
    kept = {}
    for path in sorted((run / "clients").glob("client-*")):
        kept[path.stem.removeprefix("client-")], _ = read_state(path)

    # model.safetensors lacks the entries that stay with the clients.
    model = make_model(config)
    parts = method_of(config).parts(model)
    absent = [part for part in Part if about.get(part) == ABSENT]
    names = parts.select(absent)
    if names and kept:
        # Average only over clients with all of these entries: a client that has not
        # trained yet may lack some.
        whole = [
            to_state({name: entries[name] for name in names})
            for entries in kept.values()
            if entries.keys() >= {*names}
        ]
        if whole:
            state = {**state, **tensors(average(whole, [1.0] * len(whole), parts))}
        notes.append(
            f"{', '.join(absent)} entries stay with the clients. The plain average of"
            f" {number_of(len(whole), 'client')} was used."
        )
    elif names:
        initial = model.state_dict()
        state = {**state, **{name: initial[name] for name in names}}
        notes.append(
            f"{', '.join(absent)} entries stay with the clients, and the run's folder"
            " has no clients/client-*.safetensors. Initial values were used. In a run"
            " with state-dir=out, clients on the server's disk save these files."
        )
    return {name: state[name] for name in parts.names}, kept, notes
