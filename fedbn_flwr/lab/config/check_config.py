"""The refusals of a config. ``Config.make`` calls these stages in order.

1. ``check_fields``: each key alone. Unknown keys, types, limits and names.
2. ``check_rows``: the keys together. ``ROWS`` has the keys that exclude each other, and
   ``only_if`` at a key has the condition for its effect.
3. ``check_data_and_methods``: the data with the model and the task, then the methods,
   then the protections, then keys without effect on these data and tests.

Each of the stages 1 and 2 reports all its problems. Stage 3 reports all problems of its
first part that has some, because each part needs the parts before it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from fedbn_flwr.errors import ConfigError, FedBNError, unknown_name
from fedbn_flwr.lab.config.data import RunData, data_of
from fedbn_flwr.lab.config.fields import (
    ONLY_IF,
    PARAMS,
    USERS,
    Fields,
    defaults_of,
)
from fedbn_flwr.lab.config.method_of_config import MethodOfConfig, method_of
from fedbn_flwr.lab.config.values import (
    CENTRALIZED,
    number,
    split,
)
from fedbn_flwr.lab.data import DATASETS, KINDS, PARTITIONS, partition_info
from fedbn_flwr.lab.models import model_info
from fedbn_flwr.lab.models.own import PUBLISHERS
from fedbn_flwr.lab.own_code import is_function
from fedbn_flwr.norms import NORMS
from fedbn_flwr.privacy.protection_settings import DPSettings
from fedbn_flwr.problems import Known, Problem, found_problems
from fedbn_flwr.server.methods.params import EVALUATIONS, TEST_BN, of_pydantic, unmet
from fedbn_flwr.server.runs.protection import uncovered
from fedbn_flwr.strategies import METHODS
from fedbn_flwr.training.own_task import OwnTask
from fedbn_flwr.training.tasks import TASKS

# The service `cli` of docker-compose.yml sets these keys in every run config, and a
# user cannot leave them out there. A run that cannot use them therefore ignores them.
_OF_THE_COMPOSE_FILE = (
    "fedtan-transport",
    "fedtan-bind",
    "fedtan-address",
    "fedtan-tls-dir",
)
F = TypeVar("F", bound=Fields)


def of_error(error: FedBNError, key: str = "") -> Problem:
    """Return an error about a value of the config as a problem of its key."""
    return Problem(error.code, str(error), key)


def of_name(key: str, name: str, allowed: Collection[str]) -> list[Problem]:
    """Return the problem of a name that is not allowed, or [] if it is allowed."""
    if name in allowed:
        return []
    return [of_error(unknown_name(key, name, allowed), key)]


def of_reading(key: str, read: Callable[[], object]) -> Iterator[Problem]:
    """Call ``read``, and yield its error, if any, as a problem of a key."""
    try:
        read()
    except FedBNError as error:
        yield of_error(error, key)


def checked_keys(
    kind: type[F], values: Mapping[str, Any], complete: bool = False
) -> tuple[F, list[Problem]]:
    """Return the config of the valid settings, and the problems of stages 1 and 2.

    Args:
        kind: the class to return.
        values: the settings.
        complete: whether ``values`` has all keys, see ``Config.make``.
    """
    config, problems = check_fields(kind, values, complete)
    problems += check_rows(config)
    # Keys of the compose file without effect count as not set.
    preset = _OF_THE_COMPOSE_FILE if complete else ()
    unused = [one for one in problems if one.reason and one.key in preset]
    defaults = defaults_of(kind)
    not_set = {one.key.replace("-", "_"): defaults[one.key] for one in unused}
    refused = [one for one in problems if one not in unused]
    return config.model_copy(update=not_set), refused


# --- stage 1: each key alone ----------------------------------------------------------
def check_fields(
    kind: type[F], values: Mapping[str, Any], complete: bool
) -> tuple[F, list[Problem]]:
    """Return the valid settings, and the problems of single keys.

    A setting with a problem has its default in the result. The arguments are those of
    ``checked_keys``.
    """
    settings, problems = dict(values), list[Problem]()
    # Check the keys, and the type and the limits of each value.
    fields = {field.alias or name: field for name, field in kind.model_fields.items()}
    try:
        config = kind.model_validate(settings)
    except ValidationError as error:
        for problem in of_pydantic(error, fields):
            if problem.key not in fields:
                problem = _unknown_key(problem.key, fields)
            problems.append(problem)
            settings = {k: v for k, v in settings.items() if str(k) != problem.key}
        config = kind.model_validate(settings)
    # The default of local-epochs does not count if local-steps is set, so compare the
    # given values. Flower's run config always has local-epochs: the value 1 then counts
    # as not set.
    steps, epochs = config.local_steps, config.local_epochs
    given = "local-epochs" in settings and epochs != (1 if complete else 0)
    if steps and epochs and given:
        problems.append(
            Problem(
                "two-lengths",
                f"local-steps={steps} and local-epochs={epochs} are both set. Set one of"
                " them",
                "local-steps",
            )
        )

    # Check the names of methods, norms, data sets, splits, tasks and tests.
    return config, [*problems, *_wrong_names(config)]


def own_modules(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the modules of the user that the values of config keys name, by key."""
    prefixes = {
        "model": PUBLISHERS,
        "dataset": KINDS,
        "loop": (),
        "partition": (),
        "task": (),
    }
    modules = {}
    for key, known in prefixes.items():
        name = str(settings.get(key, ""))
        if is_function(name, known):
            modules[key] = name.partition(":")[0]
    return modules


def _unknown_key(key: str, keys: Collection[str]) -> Problem:
    """Return the problem of an unknown key, with the nearest keys.

    These are the keys with its initials or with its word, or else two similar keys.
    """
    hint = " No key has a similar name."
    near = []
    for known in keys:
        words = known.split("-")
        if key in (*words, "".join(word[0] for word in words)):
            near.append(known)
    near = near or difflib.get_close_matches(key, keys, n=2)
    if near:
        hint = f" Did you mean {' or '.join(map(repr, near))}?"
    return Problem("unknown-key", f"unknown key {key!r}.{hint}", key)


def _wrong_names(config: Fields) -> Iterator[Problem]:
    """Yield a problem for each unknown name."""
    yield from of_name("strategy", config.strategy, [*METHODS, CENTRALIZED])
    yield from of_name("norm", config.norm, NORMS)
    # A name with a colon is own data, such as folder:PATH, and not a registered data set.
    if ":" not in config.dataset:
        yield from of_name("dataset", config.dataset, DATASETS)
    if config.partition and ":" not in config.partition:
        yield from of_name("partition", config.partition, PARTITIONS)
    # A name with a colon is a user's task.
    if config.task and ":" not in config.task:
        yield from of_name("task", config.task, TASKS)
    for name in split(config.eval_on):
        yield from of_name("eval-on", name, EVALUATIONS)


# --- stage 2: the keys together -------------------------------------------------------
def _wrong_decay_time(at: str) -> str:
    """Return the first entry of ``lr-decay-at`` that is not allowed, or ""."""
    for entry in split(at):
        value = number(entry)
        is_round = isinstance(value, int) and value >= 0
        is_fraction = isinstance(value, float) and 0 <= value <= 1
        if not (entry == "freeze" or is_round or is_fraction):
            return entry
    return ""


def _wrong_decay_factors(at: str, factor: str) -> str:
    """Return the number of decays if the factors do not fit them, or ""."""
    # A text that is not a number counts as 0 and is refused.
    factors = [number(text) or 0 for text in split(factor)]
    decays = len(split(at))
    fits = len(factors) in (1, decays) and all(one > 0 for one in factors)
    return "" if fits else str(decays)


def _wrong_main_test(eval_on: str) -> str:
    """Return why the first test cannot give the run's main metric, or ""."""
    reasons = {
        "personal-domains": "personal-domains has no mean",
        "global-train": "global-train is on training examples",
    }
    return reasons.get(next(iter(split(eval_on)), ""), "")


ROWS: Sequence[Problem] = (
    # rounds, steps and the learning rate
    Problem(
        "early-stopping-without-validation",
        "early-stopping={params.early_stopping} needs validation-share above 0: the"
        " score comes from examples that no client trains on",
        "early-stopping",
        when=lambda config, _: config.early_stopping and not config.validation_share,
    ),
    Problem(
        "early-stopping-with-class-moments",
        "early-stopping={params.early_stopping} goes back to the best round, but"
        " class-moments=true measures the model of the last round: leave one of them out",
        "class-moments early-stopping",
        when=lambda config, _: config.early_stopping and config.class_moments,
    ),
    Problem(
        "early-stopping-without-checkpoint",
        "early-stopping={params.early_stopping} goes back to the checkpoint of the best"
        " round: set checkpoint-every above 0",
        "early-stopping",
        when=lambda config, _: config.early_stopping and not config.checkpoint_every,
    ),
    Problem(
        "no-local-step",
        "local-steps and local-epochs are both 0: nothing to train; set one of them"
        " above 0",
        "local-steps",
        when=lambda config, _: not config.local_steps and not config.local_epochs,
    ),
    Problem(
        "decay-time",
        "lr-decay-at: {found!r} is not a round (int), a fraction in [0, 1] or 'freeze'",
        "lr-decay-at",
        when=lambda config, _: _wrong_decay_time(config.lr_decay_at),
    ),
    Problem(
        "decay-factors",
        "lr-decay-factor={params.lr_decay_factor!r} must be one number above 0, or one"
        " for each of the {found} entries of lr-decay-at",
        "lr-decay-at",
        when=lambda config, _: _wrong_decay_factors(
            config.lr_decay_at, config.lr_decay_factor
        ),
    ),
    # tests
    Problem(
        "no-main-metric",
        "the first test of eval-on gives the run's main metric, but {found}: name another"
        " test before it",
        "eval-on",
        when=lambda config, _: _wrong_main_test(config.eval_on),
    ),
    Problem(
        "test-without-test-bn",
        "eval-on={found} needs test-bn: set test-bn to batch or mix",
        "test-bn",
        when=lambda config, _: (
            not config.test_bn
            and ",".join(
                name for name in split(config.eval_on) if name.endswith(TEST_BN)
            )
        ),
    ),
    # protections
    *DPSettings.checks,
    # Noise covers only the model. Whether a round has a result, and which round is the
    # best, must therefore not depend on the clients' data.
    Problem(
        "dp-stops-early",
        "early-stopping={params.early_stopping} chooses a round by the clients'"
        " validation examples, which epsilon does not cover; leave early-stopping out",
        "early-stopping",
        when=lambda config, _: config.dp != "off" and config.early_stopping,
    ),
)
"""The keys of a config that exclude each other."""

# Keys about several clients. The single client of strategy=centralized cannot use them.
_OF_SEVERAL_CLIENTS = ("fraction-train", "variance")


def check_rows(config: Fields) -> list[Problem]:
    """Return the problems of keys that exclude each other, then keys without effect."""
    found = [one.spelled("-") for one in found_problems(ROWS, config, Known())]

    # Conditions are about the keys of this run. If the name of a method is misspelt, its
    # keys are unknown.
    misspelt = config.strategy not in {*PARAMS, CENTRALIZED}
    ours = {}
    for key, value in config.model_dump(by_alias=True).items():
        if not USERS[key] or config.strategy in USERS[key]:
            ours[key] = value

    reasons, defaults = {}, defaults_of(type(config))
    for key in _given(config):
        if key in _OF_SEVERAL_CLIENTS and config.strategy == CENTRALIZED:
            reasons[key] = "strategy=centralized has one client"
        elif key in ours:
            reasons[key] = unmet(ONLY_IF[key], ours, defaults)
        elif not misspelt:
            reasons[key] = f"it is for {', '.join(USERS[key])}"
    refused = [one for one in found if one.effect == "refuse"]
    unused = {one.key: one.text for one in found if one.effect == "no-effect"}
    return [*refused, *_without_effect(config, reasons | unused)]


def _given(config: Fields) -> dict[str, Any]:
    """Return the values of the keys; a key with its default counts as not set."""
    return config.model_dump(by_alias=True, exclude_defaults=True)


def _without_effect(config: Fields, reasons: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem for each key that is set although it has no effect.

    Args:
        config: the settings.
        reasons: the reason by key; "" if the key has an effect.
    """
    given = _given(config)
    for key, reason in reasons.items():
        if reason and key in given:
            problem = Problem("no-effect", reason, key, effect="no-effect")
            yield problem.with_value(given[key])


# --- stage 3: the data and the methods ------------------------------------------------
def check_data_and_methods(config: Fields) -> list[Problem]:
    """Return the problems of the data, the methods and the protections.

    If there are none, return the keys without effect on these data and tests.
    """
    data, method = data_of(config), method_of(config)
    problems = [*_of_data(config, data)]
    if not problems:
        try:
            refused = [one for one in method.problems if one.effect == "refuse"]
            problems = [one.spelled("-") for one in refused]
            problems = problems or [*_of_protections(config, data, method)]
        except FedBNError as error:
            problems = [of_error(error, "strategy")]
    return problems or [*_without_effect(config, _unused(config, data, method))]


def _of_data(config: Fields, data: RunData) -> Iterator[Problem]:
    """Yield the problems of the data, their model, the task and the split."""
    # The checks below need the data set, the model and the augmentation.
    unreadable = [
        *of_reading("dataset", lambda: data.info),
        *of_reading("model", lambda: model_info(config.model)),
        *of_reading("augment", lambda: data.augmentation),
    ]
    if unreadable:
        yield from unreadable
        return
    info = data.info
    yield from of_reading("partition", lambda: partition_info(data.split_name))
    yield from of_reading("task", lambda: _check_task(config, data))

    # The number of classes of own data comes from the data or from num-classes, so only
    # a registered data set has a number to compare with.
    classes = 0 if data.is_own else info.num_classes
    if config.partition in ("", "classes") and 0 < classes < config.classes_per_client:
        yield Problem(
            "too-many-classes",
            f"classes-per-client={config.classes_per_client} is more than the {classes}"
            f" classes of dataset={config.dataset}; use 1 to {classes}",
            "classes-per-client",
        )
    if 0 < config.num_classes < classes:
        yield Problem(
            "too-few-classes",
            f"num-classes={config.num_classes} is less than the {classes} classes of"
            f" dataset={config.dataset}",
            "num-classes",
        )


def _check_task(config: Fields, data: RunData) -> None:
    """Raise ConfigError if labels, metrics, model or feature-norm do not fit the task."""
    info = data.info
    # ``shape`` raises an error if the model does not accept an example of these data.
    _ = data.shape
    is_own = isinstance(info.task, OwnTask)
    if config.task and config.task != info.task.name and not is_own:
        raise ConfigError(
            f"task={config.task}: the labels of dataset={config.dataset} are for"
            f" {info.task.name}. Leave task out, or use data of your own that have"
            " such labels.",
            code="task-of-labels",
        )
    if is_own and config.class_moments:
        raise ConfigError(
            f"class-moments needs one class for each example, but task={config.task} is"
            " a task of your own. Leave class-moments out."
        )
    task = data.task
    if task.by_pixel and not model_info(config.model).per_pixel:
        raise ConfigError(
            f"dataset={config.dataset} is for {task.name}, but model={config.model} gives"
            " one vector of outputs for each example. Use another data set, or your own"
            " model, module:function",
            code="model-of-task",
        )
    if config.feature_norm and task.by_pixel:
        raise ConfigError(
            "feature-norm is for a vector of features before a linear classifier, but"
            f" the task {task.name} has a prediction for each pixel. Leave it out.",
            code="feature-norm-of-pixels",
        )


def _of_protections(
    config: Fields, data: RunData, method: MethodOfConfig
) -> Iterator[Problem]:
    """Yield the problems of values and results that dp does not cover."""
    if config.dp == "off":
        return
    yield from uncovered(method.methods, "dp", config.dp)
    # The noise covers only the updates of the clients, not results on their data.
    tests = [
        name
        for name in method.tests
        if name.startswith("personal") or name == "global-train"
    ]
    remedies = {
        f"eval-on={','.join(tests)}": tests and "use eval-on=global",
        "validation-share": config.validation_share and "leave it out",
        "held-out-clients": config.held_out_clients and "leave it out",
    }
    for setting, remedy in remedies.items():
        if remedy:
            yield Problem(
                "unprotected-report",
                f"{setting} reports results on the clients' data, which epsilon does"
                f" not cover: {remedy}",
                "dp",
            )
    # If the data determine the number of classes, one example with a new class adds an
    # output to the model of all clients.
    has_classes = data.info.task.name in ("classification", "segmentation")
    if data.is_own and has_classes and not config.num_classes:
        yield Problem(
            "dp-reads-classes",
            f"dp={config.dp}: the data decide the number of classes, which epsilon does"
            " not cover: set num-classes",
            "dp",
        )


def _unused(config: Fields, data: RunData, method: MethodOfConfig) -> dict[str, str]:
    """Return the reason of each key that has no effect in this run, set or not."""
    info, task, tests = data.info, data.plain_task, method.tests
    height = config.image_size if info.input_shape else data.shape[1]
    adapted = any(test.endswith(TEST_BN) for test in tests)
    rows = (
        # the data
        ("augment", info.input_shape, "it is for images"),
        (
            "image-size",
            config.image_size not in (0, height),
            f"model={config.model} takes images of {height} pixels",
        ),
        # The model of such a task has one output for any number of classes.
        ("num-classes", task.outputs(2) != 2, f"task {task.name} has one output"),
        (
            "classes-per-client",
            data.split_name != "classes",
            "it is for partition=classes",
        ),
        (
            "held-out-clients",
            data.held_out and data.on_nodes,
            "only the nodes have the data",
        ),
        # the tests
        (
            "test-bn",
            not data.held_out and not adapted,
            "it is for tests of eval-on that end in -test-bn, and for held-out-clients",
        ),
        (
            "held-out-clients",
            data.held_out and method.shares_nothing,
            f"{config.strategy} shares no model",
        ),
        # the methods
        (
            "lr-decay-at",
            "freeze" in split(config.lr_decay_at) and not method.freezes_bn,
            f"freeze is for fixbn and fedtan2, and {config.strategy} never freezes BN",
        ),
    )
    unused = {key: reason for key, met, reason in rows if met}
    for problem in method.problems:
        if problem.effect == "no-effect":
            unused[problem.key.replace("_", "-")] = problem.text
    return unused
