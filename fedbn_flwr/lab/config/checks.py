"""Checks of keys together: all problems are found at once.

They are for the settings of a run with the registries (``Values``), and without them and without torch (``Known``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from fedbn_flwr.errors import ConfigError, FedBNError
from fedbn_flwr.lab.config.table import CENTRALIZED
from fedbn_flwr.lab.config.texts import check_known, split, wrong

if TYPE_CHECKING:
    from fedbn_flwr.lab.config.at_once import Known
    from fedbn_flwr.lab.config.values import Values

__all__ = ["problems_of"]

T = TypeVar("T")


def problems_of(config: Values | Known) -> list[str]:
    """Return what is wrong with the keys together, one line each."""
    problems = [*_of_names(config), *_of_data(config)]
    if not problems:  # else the methods cannot be asked
        problems += _noted(problems, _of_methods, config) or []
    return problems + _of_training(config)


def _noted(problems: list[str], read: Callable[..., T], *args: Any) -> T | None:
    """Return what a function returns; None if it raises an error, which is added to the problems."""
    try:
        return read(*args)
    except FedBNError as error:
        problems.append(str(error))
        return None


def _of_names(config: Values | Known) -> list[str]:
    """Return what is wrong with names of methods and norms."""
    problems: list[str] = []
    _noted(problems, check_known, "strategy", config.strategy, config.known("strategy"))
    for role, name in config.added_methods():
        _noted(problems, check_known, role, name, config.known(role))
    names = config.method_names()
    if twice := sorted({name for name in names if names.count(name) > 1}):
        problems.append(f"{', '.join(twice)}: named twice in strategy, local-part, client-hooks and server-step")
    _noted(problems, check_known, "norm", config.norm, config.known("norm"))
    return problems


def _of_methods(config: Values | Known) -> list[str]:
    """Return what is wrong with the settings of the methods, or does not fit privacy."""
    problems: list[str] = []
    if config.strategy != CENTRALIZED:
        problems += (problem.text for problem in config.problems("refuse"))
    if problems or not config.protected:
        return problems
    from fedbn_flwr.lab.config.privacy_checks import dp_problems, mask_problems

    with_data = cast("Values", config)  # the others are never protected
    if config.dp != "off":
        problems += dp_problems(with_data)
    if not problems and config.masked_sums:
        problems += mask_problems(with_data)
    return problems


def _of_data(config: Values | Known) -> list[str]:
    """Return what is wrong with the data, the task and the tests, and what cannot be read."""
    problems: list[str] = []
    info: Any = _noted(problems, config.data_info)
    if info:
        _noted(problems, check_known, "partition", config.split_name(), config.known("partition"))
    _noted(problems, _check_task, config, info)
    augment = _noted(problems, config.augmentation)
    _noted(problems, config.decays)
    for name in split(config.eval_on):
        _noted(problems, check_known, "eval-on", name, config.known("eval-on"))
    asked = ",".join(config.adapted_tests())
    classes = info.num_classes if info and not config.is_own() else 0
    moved = augment.each if augment and info and info.task.by_pixel else ()
    problems += wrong(
        (
            split(config.eval_on)[:1] == ["personal-domains"],
            "eval-on=personal-domains has no mean, which a run's main metric needs: name another test before it",
        ),
        (asked and not config.test_bn, f"eval-on={asked} needs test-bn: {', '.join(config.known('test-bn'))}"),
        (
            config.partition in ("", "classes") and classes and config.classes_per_client > classes,
            f"classes-per-client={config.classes_per_client} is more than the {classes} classes of "
            f"dataset={config.dataset}; use 1 to {classes}",
        ),
    )
    for name in moved:
        if name.endswith("-augment"):
            problems.append(f"augment: {name} would move the image and not the classes of its pixels")
    return problems + wrong(
        (
            config.num_classes and config.num_classes < classes,
            f"num-classes={config.num_classes} is fewer than the {classes} of dataset={config.dataset}",
        ),
    )


def _of_training(config: Values | Known) -> list[str]:
    """Return what is wrong with rounds, steps and the learning rate."""
    stopping = f"early-stopping={config.early_stopping}"
    return wrong(
        (
            config.early_stopping and not config.validation_share,
            f"{stopping} needs validation-share above 0: the score is that on examples that no client trains on",
        ),
        (
            config.early_stopping and not config.checkpoint_every,
            f"{stopping} goes back to the checkpoint of the best round: set checkpoint-every above 0",
        ),
        (
            not config.local_steps and not config.local_epochs,
            "local-steps and local-epochs are both 0: nothing to train; set one of them above 0",
        ),
        (
            config.series and not _names_a_series(config.series),
            f"series={config.series!r} must be 1 to 64 letters, digits, '.', '-' or '_', no '.' in front",
        ),
    )


def _names_a_series(text: str) -> bool:
    from fedbn_flwr.messages.protocol import SERIES_PATTERN

    return SERIES_PATTERN.fullmatch(text) is not None


def _check_task(config: Values | Known, info: Any) -> None:
    """Check that the labels can be for the task, that it has the metrics, and that the model is for it."""
    per_pixel = config.per_pixel()
    if config.task:
        check_known("task", config.task, config.known("task"))
    if info is None:
        return
    config.example_shape()
    possible = (info.task.name, *info.tasks)
    if config.task and config.task not in possible:
        raise ConfigError(
            f"task={config.task}: the labels of dataset={config.dataset} are for {', '.join(possible)}. Leave task "
            "out, or use data of your own that have such labels."
        )
    task = config.learning_task()
    if per_pixel is not None and per_pixel != task.by_pixel:
        allowed = ", ".join(config.models_for(task.by_pixel))
        gives = "outputs for each pixel" if per_pixel else "one vector of outputs for each example"
        raise ConfigError(
            f"dataset={config.dataset} is for {task.name}, model={config.model} gives {gives}. Use another data set, "
            f"or one of the models {allowed}"
        )
    if config.feature_norm and task.by_pixel:
        raise ConfigError(
            f"feature-norm is for a vector of features before a linear classifier, and the task {task.name} "
            "has a prediction for each pixel. Leave it out."
        )
