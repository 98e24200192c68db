"""``fedbn-flwr advise`` looks at the sites, tries methods, and gives an answer.

1. Look: a few rounds of FedAvg with BatchNorm, and the doctor's findings about them.
2. Try: short runs of all candidates with at least three learning rates each. The better
   half continues with longer runs. The scores come from validation examples.
3. Answer: the best two methods, FedAvg and training alone as whole runs with three
   seeds.

All runs are in one folder. After a kill, the same call does only the missing runs and
gives the same answer.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.errors import ConfigError, RunFailedError
from fedbn_flwr.lab.advice.candidates import (
    FEDAVG,
    Settings,
    candidates,
    shared_settings,
)
from fedbn_flwr.lab.advice.halving import (
    LOOK,
    SEEDS,
    Point,
    affordable,
    cost,
    finalists,
    halve,
    of_length,
)
from fedbn_flwr.lab.advice.verdict import conditions, verdict
from fedbn_flwr.lab.config import Config, Scalar, data_of
from fedbn_flwr.lab.doctor import diagnose_run
from fedbn_flwr.lab.files import ADVICE_FILE, ASKED_FILE, read_json, read_metrics
from fedbn_flwr.lab.output.folder import lock_folder, writing
from fedbn_flwr.lab.own_code import is_function, own_function
from fedbn_flwr.lab.partitioned.counts import usual_steps
from fedbn_flwr.lab.partitioned.partitioned_data import (
    PartitionedData,
    count_clients,
    partitioned_data,
)
from fedbn_flwr.lab.studies.one_run import do_cell, is_done
from fedbn_flwr.lab.studies.parallel import runner_of
from fedbn_flwr.lab.studies.study import Cell, Study
from fedbn_flwr.lab.studies.sweep import (
    Follower,
    LogFollower,
    check_data,
    do_all,
    sweep,
)

logger = logging.getLogger("flwr")

RECOMMENDED_FILE = "recommended.yaml"
_VALIDATION = 0.2  # share of the training examples, unless the config has one
_AGAIN = "give the same command again"


def advise(
    build_model: Callable[..., Any],
    client_data: Callable[..., Any],
    out: Path,
    settings: Settings,
    *,
    loop: Callable[..., Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Try methods on a user's own model, data and training loop, and return the advice.

    Args:
        build_model: makes the model, as ``model=module:function``.
        client_data: returns the data of a client, as ``dataset=module:function``.
        out: the folder of all runs, see ``advise_config``.
        settings: the other settings of a run, such as ``num-clients``.
        loop: takes the steps of a round, as ``loop=module:function``. None uses the
            loop of the package.
        options: the options of ``advise_config``, such as ``rounds`` and ``metric``.

    Raises:
        ConfigError: a function cannot be found by its name in its module, and as
            ``advise_config``.
        RunFailedError: as ``advise_config``.
    """
    own = {"model": build_model, "dataset": client_data, "loop": loop}
    named = {key: _name_of(key, one) for key, one in own.items() if one}
    return advise_config({**settings, **named}, out, **options)


def advise_config(
    given: Settings,
    out: Path,
    *,
    rounds: int | None = None,
    hours: float | None = None,
    metric: str = "",
    methods: Sequence[str] = (),
    rates: Sequence[float] = (),
    parallel: int | None = None,
    follower: Follower | None = None,
    say: Callable[[str], None] = logger.info,
) -> dict[str, Any]:
    """Try methods on the sites of a config and return the advice.

    Args:
        given: settings of a run, as in a config file.
        out: the folder of all runs. ``advice.json`` has the returned content,
            ``recommended.yaml`` the config of the recommended method, and
            ``fedbn-flwr report`` makes the page.
        rounds: the most rounds of all runs together; by default, what whole runs of
            ``num-server-rounds`` need.
        hours: about the most hours of all rounds together on this machine, estimated
            from the first rounds. The starts of the runs take additional time.
        metric: the metric that compares the methods; by default the metric of the task.
        methods: methods to try in addition to the references, such as "fixbn". By default,
            the doctor and the situation suggest them.
        rates: the learning rates to try; by default 0.3, 1 and 3 times the config's.
        parallel: runs at a time; by default, the fastest number.
        follower: observes the runs.
        say: receives the findings and the plan as text, before the trials.

    Returns:
        The content of ``advice.json``. Scores are shares of 1. A difference is the
        score of the best method minus the score of another method.

    Raises:
        ConfigError: a setting is wrong, the budget is too small for one halving, or
            clients have no validation examples; no trial was done.
        RunFailedError: runs failed, or all trials of a length diverged.
    """
    if rounds and hours:
        raise ConfigError("--rounds and --hours are two budgets. Give one of them.")
    settings = {**given}
    if metric:
        others = str(settings.get("metrics", "")).split(",")
        settings["metrics"] = ",".join(dict.fromkeys([metric, *filter(None, others)]))
    config = Config.make(settings)
    full, seed = config.num_server_rounds, config.seed
    base: dict[str, Scalar] = {
        "eval-on": "personal-own",
        "validation-share": _VALIDATION,
        **shared_settings(settings),
    }
    base.pop("early-stopping", None)
    tried_rates = [*rates] or [
        float(f"{factor * config.learning_rate:.2g}") for factor in (0.3, 1, 3)
    ]
    if len({*tried_rates}) < 3 or not all(0 < rate < math.inf for rate in tried_rates):
        raise ConfigError(
            f"rates={tried_rates}: give at least three different learning rates above 0."
        )
    if hours is not None and not 0 < hours < math.inf:
        raise ConfigError(f"hours={hours} must be a finite number above 0.")
    # The doctor's findings can only add methods, so refuse a budget that is too small
    # for the methods without them before any work.
    fewest, _ = candidates(settings, base, [], methods)
    least = len(fewest) * len(tried_rates)
    affordable(rounds or cost(full, least), least, full)
    follower = follower or LogFollower()

    asked = {"settings": settings, "rounds": rounds, "hours": hours, "rates": [*rates]}
    with lock_folder(out, "study"):
        _refuse_other_use(out, {**asked, "methods": [*methods]})
        # Look: a few rounds of FedAvg, and the doctor.
        look = _look(base, config, out)
        findings = diagnose_run(look.folder(out)).findings
        steps = usual_steps(look.config, _split(look.config))
        validation = _validation(look.config)
        tried, left_out = candidates(settings, base, findings, methods, steps)
        points = [Point(one, rate) for one in tried for rate in tried_rates]
        budget = rounds or cost(full, len(points))
        # The first round also builds the models.
        first, *later = read_metrics(look.folder(out) / "metrics.jsonl")
        one_round = statistics.fmean(line["seconds"] for line in later or [first])
        if hours:
            budget = int(hours * 3600 * (parallel or 1) / one_round)
        whole = affordable(budget, len(points), full)
        found = [
            f"{one.what} Try: {remedy.setting} ({remedy.why})."
            for one in findings
            for remedy in one.remedies[:1]
        ]
        hour = cost(whole, len(points)) * one_round / (parallel or 1) / 3600
        for text in (
            *found,
            *(f"Try {one.name}: {one.why}" for one in tried),
            *(f"Not tried: {name}: {why}" for name, why in left_out.items()),
            f"{len(points)} trials with the rates {', '.join(map(str, tried_rates))}, then"
            f" whole runs of {whole} of {full} rounds with {SEEDS} seeds: at most"
            f" {cost(whole, len(points)):,} rounds together, about {hour:.1g} hours at the"
            " speed of FedAvg, without the start of each run."
            f" {validation[1]}",
        ):
            say(text)

        # Try: trials on validation examples.
        def do(cells: Sequence[Cell]) -> None:
            check_data(cells)
            do_all(cells, out, runner_of(cells, parallel), follower)

        rungs, failed = halve(points, base, whole, full, seed, out, do)
        for name, why in failed.items():
            say(f"Left out: {name}: {why}")

    # Answer: whole runs with three seeds.
    last = finalists(rungs[-1], points[0].candidate.metric)
    study = Study(
        name=f"advice for {config.dataset}",
        base=of_length(base, whole, full),
        methods={p.candidate.name: of_length(p.settings, whole, full) for p in last},
        seeds=[seed + number for number in range(SEEDS)],
    )
    # A final run that diverged has no score, and the others still give an answer.
    with suppress(RunFailedError):
        sweep(study, out, runner_of([*study.cells()], parallel), follower)
    advice = verdict(study, last, points[0].candidate.metric, out)
    advice |= {
        "found": found or ["The doctor found no fault in FedAvg with BatchNorm."],
        "candidates": [vars(one) for one in tried],
        "rates": tried_rates,
        "left-out": left_out | failed,
        "trials": [
            {
                "rounds": rung.rounds,
                "scores": {
                    f"{point.candidate.name}, learning-rate={point.rate}": score
                    for point, score in rung.scores.items()
                },
            }
            for rung in rungs
        ],
        "conditions": conditions(
            advice, rungs, (whole, full), look.config, config, validation
        ),
    }
    chosen = next(p for p in last if p.candidate.name == advice["best"])
    with writing(out, _AGAIN):
        text = _recommended(settings, chosen, advice["answer"])
        write_atomically(out / RECOMMENDED_FILE, text)
        write_atomically(out / ADVICE_FILE, json.dumps(advice, indent=2) + "\n")
    return advice


def _name_of(key: str, value: Callable[..., Any]) -> str:
    """Return the text ``module:function`` of a function.

    Raises:
        ConfigError: the function cannot be found by its name in its module.
    """
    name = f"{value.__module__}:{getattr(value, '__qualname__', '')}"
    found = own_function(key, name) if is_function(name) else None
    if found is not value or value.__module__ == "__main__":
        raise ConfigError(
            f"{key}: {value!r} is not the function that {name!r} means. Runs of other"
            " processes and recommended.yaml find it by this name: define it with"
            " `def` at the top of a module that the script imports."
        )
    return name


def _look(base: Settings, config: Config, out: Path) -> Cell:
    """Do a few rounds of FedAvg with BatchNorm, unless they are done.

    Raises:
        ConfigError: data cannot be used, or no site has validation examples.
        RunFailedError: the run failed.
    """
    rounds = min(LOOK, config.num_server_rounds)
    shared = of_length(base, rounds, config.num_server_rounds)
    settings: Settings = {"strategy": "fedavg", "seed": config.seed}
    cell = Cell(FEDAVG, "look", config.seed, settings, shared)
    check_data([cell])
    _validation(cell.config)
    if not is_done(cell, out):
        error = do_cell(cell, out)
        if error:
            raise RunFailedError(f"the first rounds of FedAvg failed: {error}")
    return cell


def _split(config: Config) -> PartitionedData:
    return partitioned_data(config, count_clients(config))


def _validation(config: Config) -> tuple[int, str]:
    """Return the number of validation examples, and a sentence about them.

    Raises:
        ConfigError: no site has one.
    """
    split = _split(config)
    smallest = min(split.validation, key=len, default=())
    total = sum(map(len, split.validation))
    if not total:
        raise ConfigError(
            f"validation-share={config.validation_share} gives no site a validation"
            " example, and the method is chosen by them. Use a larger validation-share."
        )
    yes = ""
    if getattr(data_of(config).task, "single", False):
        labels = split.dataset.train.targets[smallest]
        yes = f", with {int((labels == 1).sum())} positive"
    return total, (
        f"{total:,} validation examples choose the method, {len(smallest):,} at the"
        f" smallest site{yes}."
    )


def _refuse_other_use(out: Path, asked: Mapping[str, Any]) -> None:
    """Raise ConfigError if the folder has other files, or trials of other settings."""
    before = read_json(out / ASKED_FILE)
    if not before and any(path.name != ".lock" for path in out.iterdir()):
        raise ConfigError(
            f"out={str(out)!r} contains files of something else. Choose a new or empty"
            " folder."
        )
    text = json.dumps(asked, indent=2) + "\n"
    now = json.loads(text)
    # Before the first trial, an error may ask for other settings.
    if now != before and (out / "tune").exists():
        was, given = (
            {**one["settings"], **one, "settings": ""} for one in (before, now)
        )
        changes = [
            f"{key}: {was.get(key)} before, {given.get(key)} now"
            for key in dict.fromkeys([*was, *given])
            if was.get(key) != given.get(key)
        ]
        raise ConfigError(
            f"out={str(out)!r} has the advice for other settings ({'; '.join(changes)})."
            " Choose another folder."
        )
    write_atomically(out / ASKED_FILE, text)


def _recommended(settings: Settings, chosen: Point, answer: Sequence[str]) -> str:
    """Return the config file of the recommended method."""
    own = {**chosen.settings}
    if "eval-on" in settings or not own.get("eval-on"):
        own.pop("eval-on", None)
    base = {**shared_settings(settings), "seed": settings.get("seed", 0)}
    _, dropped = Config.make_of_shared(base, own)
    values = {key: value for key, value in base.items() if key not in dropped} | own
    comment = "".join(f"# {sentence}\n" for sentence in answer)
    return comment + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
