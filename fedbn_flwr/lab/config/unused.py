"""Keys that were set and have no effect: each with what it needs."""

from __future__ import annotations

from typing import Any

from fedbn_flwr.lab.config.fields import MethodSettings
from fedbn_flwr.lab.config.method_settings import config_fields, methods_with
from fedbn_flwr.lab.config.table import CENTRALIZED
from fedbn_flwr.lab.config.texts import split
from fedbn_flwr.lab.config.values import Values
from fedbn_flwr.lab.data import is_own
from fedbn_flwr.norms import NORMS
from fedbn_flwr.privacy.settings import unused_dp, unused_masks
from fedbn_flwr.server.params import TEST_BN
from fedbn_flwr.strategies import STRATEGIES

__all__ = ["without_effect"]

Conditions = dict[str, tuple[bool, str]]
"""By key whether it has an effect, and what it needs for one."""

_OF_A_FEDERATION = (
    "fraction_train",
    "cohort_rounds",
    "fraction_evaluate",
    "min_replies",
    "round_timeout",
    "variance",
    "momentum_scope",
    "agc",
    "recalibrate",
    "local_part",
    "client_hooks",
    "server_step",
    "state_dir",
    "series",
)
_FOR_BATCHNORM = "it is for norm=batch and batch-renorm"


def without_effect(config: Values) -> dict[str, tuple[Any, str]]:
    """Return the keys that differ from their default and that this run cannot use: value, and what they need."""
    unused = _unused(config)
    if config.strategy == CENTRALIZED:
        unused |= dict.fromkeys(_OF_A_FEDERATION, "strategy=centralized has no clients")
        if not all(name.startswith(("global", "personal")) for name in config.evaluations()):
            unused["eval_on"] = (
                "strategy=centralized has one model: use tests whose names begin with global or personal"
            )
        used: set[str] = set()
    else:
        unused |= {problem.key: problem.text for problem in config.problems("unused")}
        used = set(config_fields(config.method().Params))
    for name in MethodSettings.model_fields:
        if name not in used and (users := [m.name for m in methods_with(STRATEGIES.values(), name)]):
            unused[name] = f"it is for {', '.join(users)}"
    without: dict[str, tuple[Any, str]] = {}
    for name, use in unused.items():
        field, value = type(config).model_fields[name], getattr(config, name)
        if value != field.default:
            without[field.alias or name] = value, use
    return without


def _unused(config: Values) -> dict[str, str]:
    """Return the keys outside the method's settings that have no effect under the other keys."""
    conditions = _of_model(config) | _of_data(config) | _of_training(config)
    unused = {name: use for name, (used, use) in conditions.items() if not used}
    unused |= unused_dp(config.dp_settings())
    return unused | unused_masks(config.mask_settings())


def _of_model(config: Values) -> Conditions:
    """Return whether the keys of the model and its norms have an effect, and what they need."""
    info = config.data_info()
    size = config.example_shape()[1] if not info.input_shape else 0
    adapts = any(name.endswith(TEST_BN) for name in config.evaluations())
    tracks = _tracks(config)
    for_adapted = "it is for tests of eval-on that end in -test-bn, and for held-out-clients"
    return {
        "variance": (tracks, _FOR_BATCHNORM),
        "norm_groups": ("groups" in NORMS[config.norm].options, "it is for norm=group and group+ws"),
        "bn_momentum": (tracks, _FOR_BATCHNORM),
        "test_bn": (
            tracks and (adapts or bool(config.held_out_clients)),
            for_adapted if tracks else _FOR_BATCHNORM,
        ),
        "frozen_bn": (bool(config.train_only) and tracks, "it is for train-only, with norm=batch and batch-renorm"),
        "image_size": (config.image_size in (0, size), f"model={config.model} takes images of {size} pixels"),
    }


def _of_data(config: Values) -> Conditions:
    """Return whether the keys of the data, the task and the split have an effect, and what they need."""
    info, task = config.data_info(), config.plain_task()
    of_user, partition = is_own(config.dataset), config.split_name()
    function = config.by_function()
    return {
        "test_share": (of_user and not function, "it is for dataset=folder: and npz:"),
        "held_out_clients": (
            not config.data_on_nodes() and not config.shares_nothing(),
            f"{config.title} shares no model" if config.shares_nothing() else "only the nodes have the data",
        ),
        "augment": (not info.input_shape, "it is for images"),
        "data_dir": (bool(info.files), f"dataset={config.dataset} needs no files"),
        "num_classes": (task.outputs(2) == 2, f"task {task.name} has one output"),
        "metrics": (
            split(config.metrics)[:1] != [task.score] or not set(split(config.metrics)) <= set(task.metrics),
            f"task {task.name} always has it",
        ),
        "partition_alpha": (partition.startswith("dirichlet"), "it is for partition=dirichlet[-equal]"),
        "classes_per_client": (partition == "classes", "it is for partition=classes"),
        "shards_per_client": ("shards" in partition, "it is for partition=shards and unbalanced-shards"),
        "domain_share": (partition == "domain", "it is for partition=domain"),
    }


def _of_training(config: Values) -> Conditions:
    """Return whether the keys of rounds, local training and its protection have an effect, and what they need."""
    never_frozen = f"freeze is for fixbn and fedtan2, and {config.title} never freezes BN"
    return {
        "fraction_evaluate": (
            any(name.startswith("personal") for name in config.evaluations()),
            "no test of eval-on is done by clients",
        ),
        "cohort_rounds": (config.fraction_train < 1, "all clients train in each round (fraction-train=1)"),
        "lr_decay_at": (
            "freeze" not in split(config.lr_decay_at) or config.freezes_bn(),
            never_frozen,
        ),
        "sampling": (bool(config.local_steps), "it is for local-steps"),
        "sgd_momentum": (config.optimizer == "sgd", "it is for optimizer=sgd"),
        "lr_decay_factor": (bool(config.lr_decay_at), "lr-decay-at is empty"),
    }


def _tracks(config: Values) -> bool:
    """Return whether the norm has running statistics."""
    return config.norm.startswith("batch")
