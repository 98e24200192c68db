"""The keys of a run, by group.

Each has a type, a default, limits, a meaning, and what it needs to have an effect. A key
is the kebab-case name of its field. This module needs no torch, so that a wrong key or
value is told at once. The settings of the methods come from
``server.methods.method_params``, those of the protections from ``privacy.settings``.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    create_model,
    field_validator,
)
from pydantic.fields import FieldInfo

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config.reading import refuse_bool, split
from fedbn_flwr.privacy.settings import DPSettings, MaskSettings
from fedbn_flwr.server.methods.method_params import PARAMS
from fedbn_flwr.server.methods.params import BATCHNORM_KINDS, SET, Params, Settings

__all__ = ["GROUPS", "STATE_IN_OUT", "Fields", "config_fields", "methods_with"]
__all__ += ["only_if_of", "own_defaults", "settings_of_methods"]

# value of state-dir for clients on the server's machine: a folder in the run's folder
STATE_IN_OUT = "out"
GROUPS = (
    *("method", "data", "clients", "model", "rounds", "local training", "tests"),
    *("settings of methods", "privacy", "files"),
)
"""The groups of keys, in the order of the tables."""


def key(
    default: Any, meaning: str, only_if: Mapping[str, Any] | None = None, **limits: Any
) -> Any:
    """Return the field of a key.

    Args:
        default: its default.
        meaning: for the table of keys.
        only_if: what other keys must be for this one to have an effect: to each key its
            values, or ``SET`` for any but its default. A value that ends with ":" is
            the begin of one.
        limits: ``ge``, ``gt``, ``le``, ``lt``.
    """
    return Field(
        default,
        description=meaning,
        json_schema_extra={"only_if": dict(only_if or {})},
        **limits,
    )


# --- the settings of the methods ------------------------------------------------------
def _extra(field: FieldInfo) -> dict[str, Any]:
    extra = field.json_schema_extra
    return extra if isinstance(extra, dict) else {}


def config_fields(kind: type[Settings]) -> dict[str, str]:
    """Return the settings that are config keys: the config's field to the setting.

    A setting without a group is no key: the engine gives it.
    """
    fields = {}
    for name, field in kind.model_fields.items():
        extra = _extra(field)
        if extra.get("group"):
            # A key that differs from the setting's name is said there.
            field_of_key = str(extra["key"]).replace("-", "_")
            fields[field_of_key or name] = name
    return fields


def methods_with(field: str, params: Mapping[str, type[Params]] = PARAMS) -> list[str]:
    """Return the methods that have a field; none for a setting of every method."""
    if field in Params.model_fields:
        return []
    return [name for name, kind in params.items() if field in config_fields(kind)]


def own_defaults(params: Mapping[str, type[Params]] = PARAMS) -> dict[str, Any]:
    """Return the config's default of each setting whose default differs by method.

    It stands for "the method's own default": 0, or -1 for a setting that may be 0.
    """
    defaults: dict[str, Any] = {}
    for name, declared in _declared(params).items():
        if len({field.default for field in declared}) == 1:
            continue
        lowest = [getattr(limit, "ge", None) for limit in declared[0].metadata]
        number = type(declared[0].default)
        defaults[name] = number(-1 if 0 in lowest else 0)
    return defaults


def settings_of_methods(params: Mapping[str, type[Params]] = PARAMS) -> dict[str, Any]:
    """Return (type, field) of each setting of the methods, for ``create_model``.

    Raises:
        ConfigError: two methods declare a setting with different types or limits.
    """
    fields: dict[str, Any] = {}
    differing = own_defaults(params)
    for name, declared in _declared(params).items():
        # one key has one type and one range, whatever the method
        first = declared[0]
        for other in declared:
            if (other.annotation, other.metadata) != (first.annotation, first.metadata):
                raise ConfigError(
                    f"methods declare the setting {name!r} with different types or"
                    " limits"
                )
        field = copy.copy(first)

        # the meaning for each method
        meanings = [str(other.description) for other in declared]
        field.description = "; ".join(dict.fromkeys(meanings))

        # a default that stands for the method's own may be outside the limits
        if name in differing:
            field.default, field.metadata = differing[name], []
            field.description += f"; {differing[name]:g} = the method's own default"
        fields[name] = (field.annotation, field)
    return fields


def _declared(params: Mapping[str, type[Params]]) -> dict[str, list[FieldInfo]]:
    """Return the fields that the methods declare for each setting."""
    declared: dict[str, list[FieldInfo]] = {}
    for kind in params.values():
        for name, setting in config_fields(kind).items():
            field = copy.copy(kind.model_fields[setting])
            field.default = _extra(field)["in_config"]
            declared.setdefault(name, []).append(field)
    return declared


def _settings_of(kind: type[Settings]) -> dict[str, Any]:
    fields = kind.model_fields.items()
    return {name: (field.annotation, field) for name, field in fields}


# --- the other keys, by group ---------------------------------------------------------
class Group(BaseModel):
    """Keys of one group."""

    # What is validated is ``Config`` alone.
    model_config = ConfigDict(defer_build=True)

    group: ClassVar[str]


class Method(Group):
    """The method, and what is added to it."""

    group = "method"

    strategy: str = key("fedavg", "method; `fedbn-flwr list strategies`")
    local_part: str = key(
        "", "the method whose local parts a combination has; empty = the strategy's"
    )
    client_hooks: str = key(
        "", "comma list of methods whose local training is added to the strategy"
    )
    server_step: str = key(
        "", "the method whose server step a combination has; empty = the strategy's"
    )


class Data(Group):
    """The examples."""

    group = "data"

    dataset: str = key(
        "digits",
        "data set; `fedbn-flwr list datasets`; data of your own by their format, or"
        " your own module:function",
    )
    data_dir: str = key(
        "", "absolute folder of the data set's files; not needed for embedded data"
    )
    image_size: int = key(
        0,
        "height of the images, pixels; 0 = as published, or the height that the model"
        " needs (torchvision's: 64, but most classifiers work at 32). Own images become"
        " squares",
        ge=0,
    )
    num_classes: int = key(0, "classes of the model; 0 = the data set's", ge=0)
    task: str = key(
        "",
        "learning task: targets, loss and metrics; empty = the data set's own. Only"
        " data of your own have a choice",
    )
    test_share: float = key(
        0.2,
        "share of own data that is the test part, where the data have none",
        {"dataset": ("folder:", "npz:")},
        gt=0,
        lt=1,
    )
    validation_share: float = key(
        0.0,
        "share of each client's training examples that is never trained on, stratified"
        " by class: its tests are `validation-*` of each tested round; early-stopping"
        " and fedbs use them",
        ge=0,
        lt=1,
    )
    augment: str = key(
        "",
        "comma list of `cropN` (pad N, crop back), `flip`, `resized-crop`,"
        " `color-jitter`, `auto-augment`, `rand-augment`, `trivial-augment`; empty ="
        " none",
    )


class Clients(Group):
    """The clients and their shares of the data."""

    group = "clients"

    num_clients: int = key(
        0,
        "clients; in process 0 = 5, or the number of groups of `natural` and `domain`;"
        " under Flower the size of the federation, 0 = any size",
        ge=0,
    )
    partition: str = key(
        "",
        "split over the clients; `fedbn-flwr list partitions`; empty = natural for own"
        " data with clients, iid for other own data, else classes",
    )
    partition_alpha: float = key(
        0.5,
        "concentration of the Dirichlet distribution",
        {"partition": ("dirichlet", "dirichlet-equal")},
        gt=0,
    )
    classes_per_client: int = key(
        2, "classes each client holds", {"partition": ("", "classes")}, ge=1
    )
    shards_per_client: int = key(
        0,
        "shards of a client (`unbalanced-shards`: at most); 0 = 2, or 30",
        {"partition": ("shards", "unbalanced-shards")},
        ge=0,
    )
    domain_share: float = key(
        1.0,
        "share of a domain used; above 1 a number of examples",
        {"partition": ("domain",)},
        gt=0,
    )
    held_out_clients: str = key(
        "",
        "clients that never train and are tested in each tested round: a comma list of"
        " names, or a number (the last; a client that is called so takes precedence)",
    )


class Model(Group):
    """The network."""

    group = "model"

    model: str = key(
        "mlp",
        "model; `fedbn-flwr list models`, torchvision:NAME, your own module:function",
    )
    norm: str = key("batch", "normalisation of the model; `fedbn-flwr list norms`")
    norm_groups: int = key(
        2, "groups of GroupNorm", {"norm": ("group", "group+ws")}, ge=1
    )
    feature_norm: Literal["", "sqrt-d", "1"] = key(
        "",
        "length of the features before the classifier (FN): sqrt-d, the root of their"
        " number; 1; empty = as they are",
    )
    init: str = key(
        "",
        "initial weights, loaded by name and shape: an absolute path of a .safetensors,"
        " .pt or .pth file, or torchvision, torchvision:NAME, timm or smp (published"
        " weights, downloaded); read by the server alone",
    )
    train_only: str = key(
        "",
        "comma list of paths of modules (`layer4,fc`): only their parameters train, the"
        " others are frozen; empty = all train",
    )
    frozen_bn: Literal["eval", "train"] = key(
        "eval",
        "BatchNorm outside train-only: eval = normalises with its running statistics,"
        " which stay as they are, train = with the batch's, and the running ones move"
        " as the method says",
        {"train-only": SET, "norm": BATCHNORM_KINDS},
    )
    bn_momentum: float = key(
        0.1,
        "momentum of BN's running statistics, torch's convention",
        {"norm": BATCHNORM_KINDS},
        gt=0,
        le=1,
    )


class Rounds(Group):
    """The rounds; more of them in ``Params``."""

    group = "rounds"

    num_server_rounds: int = key(20, "rounds R, counted from 1", ge=1)
    fraction_train: float = key(
        1.0, "share of the clients that train in a round", gt=0, le=1
    )
    round_timeout: float = key(
        0.0,
        "seconds to wait for the replies of a round, and for nodes; 0 = 3600, and in"
        " process as long as it takes",
        ge=0,
    )
    early_stopping: int = key(
        0,
        "K > 0: the run ends when the score on the validation examples has not improved"
        " for K tested rounds, and its result is the state after the best round; needs"
        " validation-share",
        ge=0,
    )


class LocalTraining(Group):
    """The training of a client in a round; more in ``Params``."""

    group = "local training"

    local_steps: int = key(0, "E steps per round; see sampling", ge=0)
    local_epochs: int = key(
        1, "E passes over the local data per round; not together with local-steps", ge=0
    )
    sampling: Literal["with-replacement", "without-replacement"] = key(
        "with-replacement",
        "how the batches of local-steps are drawn; a batch of at least the size of a"
        " client's data is all of them",
        {"local-steps": SET},
    )
    batch_size: int = key(32, "examples per step; 0 = the whole local data set", ge=0)
    learning_rate: float = key(0.1, "learning rate of the optimizer in round 1", gt=0)
    lr_decay_at: str = key(
        "", "comma list: decay after a round (int), a fraction of R, or `freeze`"
    )
    lr_decay_factor: str = key(
        "0.1",
        "one factor, or a comma list as long as lr-decay-at",
        {"lr-decay-at": SET},
    )
    optimizer: Literal["sgd", "adam", "adamw"] = key(
        "sgd",
        "torch's SGD, Adam or AdamW, new in each round; scaffold and momentum-scope"
        " need sgd",
    )
    sgd_momentum: float = key(
        0.0, "momentum of SGD; see momentum-scope", {"optimizer": ("sgd",)}, ge=0, lt=1
    )
    weight_decay: float = key(0.0, "L2 coefficient on every trainable parameter", ge=0)
    device: str = key("auto", "auto, cpu, cuda or cuda:N; auto = cuda if available")
    amp: bool = key(False, "bfloat16 autocast in the forward passes of training")
    torch_threads: int = key(
        1, "CPU threads of torch per client (changes the last bits)", ge=1
    )


class Tests(Group):
    """The tests; more of them in ``Params``."""

    group = "tests"

    fraction_evaluate: float = key(
        1.0, "share of the clients that evaluate", gt=0, le=1
    )
    metrics: str = key(
        "",
        "comma list of metrics of every test, beside the task's own. Early stopping,"
        " tuning, tables and reports go by the first, which may be loss; empty = the"
        " task's own (accuracy; segmentation miou, multi-label auroc, regression mae)."
        " Others: balanced-accuracy, macro-f1, auprc; dice; rmse",
    )
    test_bn: Literal["", "batch", "mix"] = key(
        "",
        "BatchNorm statistics of the tests of eval-on that end in -test-bn, and of one"
        " more test of held-out clients, each from its own test inputs: batch = each"
        " test batch's, mix = these with the stored ones, which weigh as much as 16"
        " examples; empty = no such test",
        {"norm": BATCHNORM_KINDS},
    )


class Files(Group):
    """What is written."""

    group = "files"

    out: str = key(
        "",
        "output folder; empty = runs/... (under Flower: FLWR_HOME/fedbn-runs/RUN_ID)",
    )
    tensorboard: bool = key(
        False,
        "scalars of each round as event files in OUT/tensorboard; needs the extra"
        " `tensorboard`",
    )
    checkpoint_every: int = key(
        10,
        "checkpoint before round 1, every so many rounds or 20 seconds, at the end and"
        " at a signal; 0 = none",
        ge=0,
    )
    state_dir: str = key(
        "",
        "absolute folder on each node in which clients keep their part; `out` ="
        " OUT/checkpoint/clients (set by `fedbn-flwr run`); empty = in memory; a node's"
        " own `state-dir` takes precedence",
    )
    series: str = key(
        "",
        "experiment id: runs with the same id continue with the parts that clients"
        " kept; empty = this run only",
    )
    resume: bool = key(
        False,
        "continue from the last checkpoint in `out`; with an empty folder start a run",
    )


# A type checker sees the fields of all methods; in a process they are made from what the
# methods declare, so that no key is written twice.
if TYPE_CHECKING:

    class SettingsOfMethods(Params, DPSettings, MaskSettings):
        """The settings of all methods and protections."""

else:
    _PROTECTIONS = _settings_of(DPSettings) | _settings_of(MaskSettings)
    SettingsOfMethods = create_model(
        "SettingsOfMethods", __base__=Group, **settings_of_methods(), **_PROTECTIONS
    )

_OWN_GROUPS: tuple[type[Group], ...] = (
    Method,
    Data,
    Clients,
    Model,
    Rounds,
    LocalTraining,
    Tests,
    Files,
)


class Fields(
    Method, Data, Clients, Model, Rounds, LocalTraining, Tests, SettingsOfMethods, Files
):
    """All keys of a run, each checked by itself."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        alias_generator=lambda name: name.replace("_", "-"),
        allow_inf_nan=False,
        coerce_numbers_to_str=True,  # YAML and the command line know no difference
    )

    @property
    def method_names(self) -> list[str]:
        """The strategy and the methods that are added to it."""
        return [
            self.strategy,
            *split(self.local_part),
            *split(self.client_hooks),
            *split(self.server_step),
        ]

    @property
    def title(self) -> str:
        """The names of the methods, joined by "+"."""
        names = [name for name in self.method_names if name != "fedavg"]
        # in the order of the registry; others, which are refused later, at the end
        order = [*PARAMS, *names]
        return "+".join(sorted(names, key=order.index)) or "fedavg"

    @property
    def protected(self) -> bool:
        """Whether single clients stay hidden: no page to give away has their counts."""
        return self.dp != "off" or self.masked_sums

    @classmethod
    def keys(cls, group: str) -> list[str]:
        """Return the keys of a group, in order."""
        names: list[str] = []
        for kind in _OWN_GROUPS:
            if kind.group == group:
                names += kind.model_fields
        # those of methods and protections name their group themselves
        for name, field in cls.model_fields.items():
            if _extra(field).get("group") == group:
                names.append(name)
        return [name.replace("_", "-") for name in names]

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool(cls, value: Any, info: ValidationInfo) -> Any:
        name = info.field_name or ""
        wanted = getattr(cls.model_fields[name].annotation, "__name__", "")
        return refuse_bool(name, value, wanted)

    @field_validator(
        "dataset",
        "data_dir",
        "init",
        "state_dir",
        "out",
        "fedtan_tls_dir",
        mode="after",
    )
    @classmethod
    def _home(cls, value: str) -> str:
        """Read ``~`` at the begin of a path, also after a prefix, as in "npz:~/data".

        No shell does it within a setting.
        """
        if ":~" not in value:
            return os.path.expanduser(value)
        kind, _, path = value.rpartition(":")
        return f"{kind}:{os.path.expanduser(path)}"


def only_if_of(kind: type[BaseModel], key: str) -> dict[str, Any]:
    """Return what other keys must be for a key to have an effect."""
    field = kind.model_fields[key.replace("-", "_")]
    conditions: dict[str, Any] = _extra(field).get("only_if", {})
    return conditions
