"""The half of the check that asks the registries, the data and the methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from fedbn_flwr.errors import ConfigError, FedBNError
from fedbn_flwr.lab.config.check_keys import of_error, of_name
from fedbn_flwr.lab.config.data import RunData, data_of
from fedbn_flwr.lab.config.fields import Fields
from fedbn_flwr.lab.config.method_of_config import MethodOfConfig, method_of
from fedbn_flwr.lab.config.values import allowed, split
from fedbn_flwr.lab.models import MODELS, model_info
from fedbn_flwr.messages.protocol import SERIES_PATTERN
from fedbn_flwr.problems import Problem
from fedbn_flwr.server.methods.disclosures import uncovered
from fedbn_flwr.server.methods.params import TEST_BN

T = TypeVar("T")


def problems_of_run(config: Fields) -> list[Problem]:
    """Return the problems of the data, the task, the methods and the protections."""
    # the data, the model and the task
    problems = _of_data(config, data_of(config))
    if config.series and not SERIES_PATTERN.fullmatch(config.series):
        text = (
            f"series={config.series!r} must be 1 to 64 letters, digits, '.', '-' or"
            " '_', no '.' in front"
        )
        problems.append(Problem("bad-value", text, "series"))
    if problems:
        return problems

    # The methods and the protections can be checked once the data are valid.
    method = method_of(config)
    try:
        return _of_methods(config, method)
    except FedBNError as error:
        return [of_error(error, "strategy")]


def _noted(problems: list[Problem], key: str, read: Callable[[], T]) -> T | None:
    """Return the result of ``read``, or add its error to the problems."""
    try:
        return read()
    except FedBNError as error:
        problems.append(of_error(error, key))
        return None


# --- the data -------------------------------------------------------------------------
def _of_data(config: Fields, data: RunData) -> list[Problem]:
    """Return the problems of the data, their model, the task and the split."""
    problems: list[Problem] = []
    # The other checks need these three.
    info = _noted(problems, "dataset", lambda: data.info)
    _noted(problems, "model", lambda: model_info(config.model))
    augment = _noted(problems, "augment", lambda: data.augmentation)
    if info is None or problems:
        return problems
    problems += of_name("partition", data.split_name, allowed("partition"))
    _noted(problems, "task", lambda: _check_task(config, data))

    # The classes of own data are found in the data, or set in the config.
    classes = 0 if data.is_own else info.num_classes
    if config.partition in ("", "classes") and 0 < classes < config.classes_per_client:
        text = (
            f"classes-per-client={config.classes_per_client} is more than the {classes}"
            f" classes of dataset={config.dataset}; use 1 to {classes}"
        )
        problems.append(Problem("bad-value", text, "classes-per-client"))
    if 0 < config.num_classes < classes:
        text = (
            f"num-classes={config.num_classes} is fewer than the {classes} of"
            f" dataset={config.dataset}"
        )
        problems.append(Problem("bad-value", text, "num-classes"))

    # An augmentation of whole images does not fit classes of pixels.
    augmentations = augment.each if augment and info.task.by_pixel else ()
    for name in augmentations:
        if name.endswith("-augment"):
            text = (
                f"augment: {name} would move the image and not the classes of its"
                " pixels"
            )
            problems.append(Problem("conflict", text, "augment"))
    return problems


def _check_task(config: Fields, data: RunData) -> None:
    """Check that the labels, the metrics and the model are for the task."""
    info = data.info
    # It raises if the model does not accept such an example.
    _ = data.shape
    if config.task and config.task != info.task.name:
        raise ConfigError(
            f"task={config.task}: the labels of dataset={config.dataset} are for"
            f" {info.task.name}. Leave task out, or use data of your own that have"
            " such labels."
        )
    # It is unknown for a user's own model.
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
            f"dataset={config.dataset} is for {task.name}, model={config.model} gives"
            f" {gives}. Use another data set, or one of the models {', '.join(fitting)}"
        )
    if config.feature_norm and task.by_pixel:
        raise ConfigError(
            "feature-norm is for a vector of features before a linear classifier, but"
            f" the task {task.name} has a prediction for each pixel. Leave it out."
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
    # With dp, masks would report the same problems again.
    if config.masked_sums and not problems:
        problems += uncovered(method.methods, "masked-sums", "true")
        problems += _uncovered(config, method, "masked-sums", "masks do")
    return problems


def _of_dp(config: Fields, method: MethodOfConfig) -> list[Problem]:
    """Return the parts of this run that bypass the noise or conflict with it."""
    problems = uncovered(method.methods, "dp", config.dp)
    problems += _uncovered(config, method, "dp", "epsilon does")
    # An example with a new class would add an output to everybody's model.
    data = data_of(config)
    has_classes = data.info.task.name in ("classification", "segmentation")
    if data.is_own and has_classes and not config.num_classes:
        text = (
            f"dp={config.dp}: the data decide the number of classes, which epsilon does"
            " not cover: set num-classes"
        )
        problems.append(Problem("conflict", text, "dp"))
    return problems


def _uncovered(
    config: Fields, method: MethodOfConfig, key: str, protects: str
) -> Iterator[Problem]:
    """Yield the settings, other than updates, that reveal the clients' data."""
    tests = []
    for name in method.tests:
        if name.startswith("personal") or name == "global-train":
            tests.append(name)
    remedies = {
        f"eval-on={','.join(tests)}": "use eval-on=global" if tests else "",
        "validation-share": "leave it out" if config.validation_share else "",
        "held-out-clients": "leave it out" if config.held_out_clients else "",
    }
    for setting, remedy in remedies.items():
        text = (
            f"{setting} reports results on the clients' data, which {protects} not"
            f" cover: {remedy}"
        )
        if remedy:
            yield Problem("conflict", text, key)


# --- keys without effect --------------------------------------------------------------
def has_no_effect_in_run(config: Fields) -> dict[str, str]:
    """Return the keys that this run cannot use, set or not, each with the reason."""
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
    # a task whose model has one output for any number of classes
    if task.outputs(2) != 2:
        unused["num-classes"] = f"task {task.name} has one output"
    names = split(config.metrics)
    if names[:1] == [task.score] and set(names) <= set(task.metrics):
        unused["metrics"] = f"task {task.name} always has it"
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
