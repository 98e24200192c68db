"""Refuse a config because of its data, methods or protections, before any work.

The checks use the registries and torch; ``check_keys`` has the checks without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fedbn_flwr.errors import ConfigError, FedBNError
from fedbn_flwr.lab.config.check_keys import of_error, of_name
from fedbn_flwr.lab.config.data import RunData, data_of
from fedbn_flwr.lab.config.fields import Fields
from fedbn_flwr.lab.config.method_of_config import MethodOfConfig, method_of
from fedbn_flwr.lab.config.values import allowed, split
from fedbn_flwr.lab.models import MODELS, model_info
from fedbn_flwr.messages.protocol import SERIES_PATTERN
from fedbn_flwr.problems import Problem
from fedbn_flwr.server.methods.check_protections import uncovered
from fedbn_flwr.server.methods.params import TEST_BN


def problems_of_run(config: Fields) -> list[Problem]:
    """Return the problems of the data, the task, the methods and the protections."""
    # Check the data, the model and the task first.
    problems = [*_of_data(config, data_of(config))]
    if problems:
        return problems

    # Check the methods and the protections only if the data are valid, because these
    # checks use the data.
    method = method_of(config)
    try:
        return _of_methods(config, method)
    except FedBNError as error:
        return [of_error(error, "strategy")]


def _of_reading(key: str, read: Callable[[], object]) -> Iterator[Problem]:
    """Call ``read``, and yield its error, if any, as a problem of a key."""
    try:
        read()
    except FedBNError as error:
        yield of_error(error, key)


# --- the data -------------------------------------------------------------------------
def _of_data(config: Fields, data: RunData) -> Iterator[Problem]:
    """Yield the problems of the data, their model, the task and the split."""
    if config.series and not SERIES_PATTERN.fullmatch(config.series):
        yield Problem(
            "series-name",
            f"series={config.series!r} must have 1 to 64 characters: letters, digits,"
            " '.', '-' and '_', with no '.' at the beginning",
            "series",
        )
    # The checks below need the data set, the model and the augmentation.
    unreadable = [
        *_of_reading("dataset", lambda: data.info),
        *_of_reading("model", lambda: model_info(config.model)),
        *_of_reading("augment", lambda: data.augmentation),
    ]
    if unreadable:
        yield from unreadable
        return
    info, augment = data.info, data.augmentation
    yield from of_name("partition", data.split_name, allowed("partition"))
    yield from _of_reading("task", lambda: _check_task(config, data))

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

    # torchvision's automatic augmentations move the pixels of an image but not its
    # targets, so they do not fit classes of pixels.
    augmentations = augment.each if augment and info.task.by_pixel else ()
    for name in augmentations:
        if name.endswith("-augment"):
            yield Problem(
                "augment-of-pixels",
                f"augment={name} would move the image but not the classes of its pixels;"
                f" leave {name} out",
                "augment",
            )


def _check_task(config: Fields, data: RunData) -> None:
    """Raise ConfigError if labels, metrics, model or feature-norm do not fit the task."""
    info = data.info
    # ``shape`` raises an error if the model does not accept an example of these data.
    _ = data.shape
    if config.task and config.task != info.task.name:
        raise ConfigError(
            f"task={config.task}: the labels of dataset={config.dataset} are for"
            f" {info.task.name}. Leave task out, or use data of your own that have"
            " such labels.",
            code="task-of-labels",
        )
    # ``per_pixel`` is None for a user's own model, because its outputs are unknown
    # here.
    task, per_pixel = data.task, model_info(config.model).per_pixel
    if per_pixel is not None and per_pixel != task.by_pixel:
        fitting = []
        for name, model in MODELS.items():
            if model.per_pixel in (task.by_pixel, None):
                fitting.append(name)
        gives = "one vector of outputs for each example"
        if per_pixel:
            gives = "outputs for each pixel"
        raise ConfigError(
            f"dataset={config.dataset} is for {task.name}, but model={config.model} gives"
            f" {gives}. Use another data set, or one of the models {', '.join(fitting)}",
            code="model-of-task",
        )
    if config.feature_norm and task.by_pixel:
        raise ConfigError(
            "feature-norm is for a vector of features before a linear classifier, but"
            f" the task {task.name} has a prediction for each pixel. Leave it out.",
            code="feature-norm-of-pixels",
        )


# --- the methods and the protections --------------------------------------------------
def _of_methods(config: Fields, method: MethodOfConfig) -> list[Problem]:
    """Return the problems of the methods, and their conflicts with the protections."""
    if method.centralized:
        return []
    problems = [one.spelled("-") for one in method.problems("refuse")]
    if problems:
        return problems
    if config.dp != "off":
        problems += _of_dp(config, method)
    # If the settings of dp have problems, the checks of masks would report the same
    # problems again.
    if config.masked_sums and not problems:
        problems += uncovered(method.methods, "masked-sums", "true")
        problems += _uncovered(config, method, "masked-sums", "masks do")
    return problems


def _of_dp(config: Fields, method: MethodOfConfig) -> Iterator[Problem]:
    """Yield a problem for each value or setting that the noise does not cover."""
    yield from uncovered(method.methods, "dp", config.dp)
    yield from _uncovered(config, method, "dp", "epsilon does")
    # If the data determine the number of classes, one example with a new class adds an
    # output to the model of all clients.
    data = data_of(config)
    has_classes = data.info.task.name in ("classification", "segmentation")
    if data.is_own and has_classes and not config.num_classes:
        yield Problem(
            "dp-reads-classes",
            f"dp={config.dp}: the data decide the number of classes, which epsilon does"
            " not cover: set num-classes",
            "dp",
        )


def _uncovered(
    config: Fields, method: MethodOfConfig, key: str, protects: str
) -> Iterator[Problem]:
    """Yield a problem for each setting that reports results on the clients' data.

    The protection covers only the updates of the clients, not these results.

    Args:
        config: the settings.
        method: the method of the run.
        key: the key of the protection.
        protects: subject and verb of the message, such as "epsilon does".
    """
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
                f"{setting} reports results on the clients' data, which {protects} not"
                f" cover: {remedy}",
                key,
            )


# --- keys without effect --------------------------------------------------------------
def has_no_effect_in_run(config: Fields) -> dict[str, str]:
    """Return the keys that have no effect in this run, each with the reason.

    The keys that are not set are included.
    """
    method = method_of(config)
    unused = _unused_of_data(config, data_of(config))
    unused |= _unused_of_tests(config, method)
    if "freeze" in split(config.lr_decay_at) and not method.freezes_bn:
        unused["lr-decay-at"] = (
            f"freeze is for fixbn and fedtan2, and {config.title} never freezes BN"
        )
    if not method.centralized:
        for problem in method.problems("no-effect"):
            unused[problem.key.replace("_", "-")] = problem.text
    return unused


def _unused_of_data(config: Fields, data: RunData) -> dict[str, str]:
    unused: dict[str, str] = {}
    info, task = data.info, data.plain_task
    if info.input_shape:
        unused["augment"] = "it is for images"
    elif config.image_size not in (0, data.shape[1]):
        unused["image-size"] = (
            f"model={config.model} takes images of {data.shape[1]} pixels"
        )
    if not info.files:
        unused["data-dir"] = f"dataset={config.dataset} needs no files"
    # The model of such a task has one output for any number of classes.
    if task.outputs(2) != 2:
        unused["num-classes"] = f"task {task.name} has one output"
    names = split(config.metrics)
    if names[:1] == [task.score] and set(names) <= set(task.metrics):
        unused["metrics"] = f"task {task.name} always reports it"
    if data.split_name != "classes":
        unused["classes-per-client"] = "it is for partition=classes"
    if data.on_nodes:
        unused["held-out-clients"] = "only the nodes have the data"
    return unused


def _unused_of_tests(config: Fields, method: MethodOfConfig) -> dict[str, str]:
    unused: dict[str, str] = {}
    personal = [name for name in method.tests if name.startswith("personal")]
    adapted = [name for name in method.tests if name.endswith(TEST_BN)]
    of_one_model = [
        name for name in method.tests if name.startswith(("global", "personal"))
    ]
    if not personal:
        unused["fraction-evaluate"] = "no test of eval-on is done by clients"
    if not config.held_out_clients and not adapted:
        unused["test-bn"] = (
            "it is for tests of eval-on that end in -test-bn, and for held-out-clients"
        )
    if method.shares_nothing:
        unused["held-out-clients"] = f"{config.title} shares no model"
    if method.centralized and len(of_one_model) < len(method.tests):
        unused["eval-on"] = (
            "strategy=centralized has one model: use tests whose names begin with"
            " global or personal"
        )
    return unused
