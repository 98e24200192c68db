"""The keys of a run, by group.

Each key has a type, a default, limits, a meaning, and the conditions for its effect. A
key is the kebab-case name of its field. The settings of the methods come from the
``Params`` of each method, the settings of the protections from
``privacy.protection_settings``.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Mapping
from types import UnionType
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
from fedbn_flwr.lab.config.values import number
from fedbn_flwr.privacy.protection_settings import DPSettings
from fedbn_flwr.server.methods.params import (
    SET,
    UNSET,
    Params,
    Settings,
    extras_of,
)
from fedbn_flwr.strategies import METHODS

# The value of state-dir that selects a folder in the run's folder, for clients on the
# server's machine.
STATE_IN_OUT = "out"
# the condition of the keys that a training loop of the user replaces
_WITHOUT_LOOP = {"loop": UNSET}
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
        meaning: the text in the table of keys.
        only_if: the condition under which the key has an effect; see ``setting``.
        limits: ``ge``, ``gt``, ``le``, ``lt``.
    """
    return Field(
        default,
        description=meaning,
        json_schema_extra={"only_if": dict(only_if or {})},
        **limits,
    )


# --- the settings of the methods ------------------------------------------------------
PARAMS: Mapping[str, type[Params]] = {
    name: method.Params for name, method in METHODS.items()
}
"""The settings of each method, in the order of the registry."""


_NO_KEYS = (
    "beta_1",
    "beta_2",
    "tau",
    "fedbs_eps",
    "fedbs_rounds",
    "min_replies",
    "fedtan_exchanges",
)
"""Settings that only Python sets."""


@functools.cache  # called in every check of a config, for every method
def config_fields(kind: type[Settings]) -> dict[str, str]:
    """Return the name of each setting that is a config key, by the config's field.

    A setting without a group is not a key, because the engine provides its value.
    """
    fields = {}
    for name, field in kind.model_fields.items():
        extra = extras_of(field)
        if extra.get("group") and name not in _NO_KEYS:
            # A setting declares ``key`` if its config key has another name than the
            # setting.
            field_of_key = str(extra["key"]).replace("-", "_")
            fields[field_of_key or name] = name
    return fields


def methods_with(field: str, params: Mapping[str, type[Params]] = PARAMS) -> list[str]:
    """Return the methods that have a setting, or [] if every method has it."""
    if field in Params.model_fields:
        return []
    return [name for name, kind in params.items() if field in config_fields(kind)]


def own_defaults(params: Mapping[str, type[Params]] = PARAMS) -> dict[str, Any]:
    """Return the config's default of each setting that has several defaults.

    Methods declare different defaults for such a setting. The config's default then
    selects the default of the run's method. It is 0, or -1 for a setting that may be 0.
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
        # All methods with this setting must declare the same type and limits, because
        # the config has one key for it.
        first = declared[0]
        for other in declared:
            if (other.annotation, other.metadata) != (first.annotation, first.metadata):
                raise ConfigError(
                    f"methods declare the setting {name!r} with different types or"
                    " limits"
                )
        field = copy.copy(first)

        # Join the different meanings of the methods.
        meanings = [str(other.description) for other in declared]
        field.description = "; ".join(dict.fromkeys(meanings))

        # If the methods have different defaults, the key's default means "use the
        # method's own default". The key's default may be outside the limits of the
        # setting, so the key has no limits.
        if name in differing:
            field.default, field.metadata = differing[name], []
            field.description += (
                f"; {differing[name]:g} selects the method's own default, and the"
                " config.yaml of the run shows that value"
            )
        fields[name] = (field.annotation, field)
    return fields


def _declared(params: Mapping[str, type[Params]]) -> dict[str, list[FieldInfo]]:
    """Return the fields that the methods declare for each setting."""
    declared: dict[str, list[FieldInfo]] = {}
    for kind in params.values():
        for name, setting in config_fields(kind).items():
            field = copy.copy(kind.model_fields[setting])
            field.default = extras_of(field)["in_config"]
            declared.setdefault(name, []).append(field)
    return declared


OWN_DEFAULTS = own_defaults()
"""The values of the config's keys that select the method's own default."""


# --- the other keys, by group ---------------------------------------------------------
class Group(BaseModel):
    """Base class of a group of config keys."""

    # Only ``Config`` is used for validation, so pydantic need not build a validator for
    # each group.
    model_config = ConfigDict(defer_build=True)

    group: ClassVar[str]


class MethodKeys(Group):
    """The key that selects the method."""

    group = "method"

    strategy: str = key("fedavg", "method; `fedbn-flwr list strategies`")


class Data(Group):
    """The examples."""

    group = "data"

    dataset: str = key(
        "digits",
        "data set (`fedbn-flwr list datasets`), your own data by their format, or your"
        " own module:function",
    )
    data_dir: str = key(
        "", "absolute path of the data set's folder; embedded data need none"
    )
    image_size: int = key(
        0,
        "height of the images in pixels; 0 selects the published height, or the height"
        " that the model needs (64 for torchvision models, but most classifiers work at"
        " 32). Own images become squares",
        ge=0,
    )
    num_classes: int = key(
        0, "number of classes of the model; 0 selects the classes of the data set", ge=0
    )
    task: str = key(
        "",
        "learning task, with its targets, loss and metrics; empty selects the task of"
        " the data set. Only your own data have a choice. module:NAME is an OwnTask of"
        " your own, with data by a function; num-classes is then the number of outputs",
    )
    test_share: float = key(
        0.2,
        "share of your own data used as test part, if the data have no test part",
        {"dataset": ("folder:",)},
        gt=0,
        lt=1,
    )
    validation_share: float = key(
        0.0,
        "share of each client's training examples reserved for validation, stratified by"
        " class. Each tested round reports the results as `validation-*`; early-stopping"
        " and fedbs use them",
        ge=0,
        lt=1,
    )
    augment: str = key(
        "",
        "comma list of `cropN` (pad N, crop back) and `flip`; empty disables"
        " augmentation",
    )


class Clients(Group):
    """The clients and their shares of the data."""

    group = "clients"

    num_clients: int = key(
        0,
        "number of clients. In process, 0 means 5, or the number of groups of `natural`"
        " and `domain`. Under Flower, this is the size of the federation, and 0 means"
        " any size",
        ge=0,
    )
    partition: str = key(
        "",
        "split over the clients (`fedbn-flwr list partitions`), or your own"
        " module:function; empty selects natural"
        " for your own data with clients, iid for your other data, and classes for"
        " published data",
    )
    partition_alpha: float = key(
        0.5,
        "concentration of the Dirichlet distribution",
        {"partition": ("dirichlet", "dirichlet-equal")},
        gt=0,
    )
    classes_per_client: int = key(
        2, "number of classes of each client", {"partition": ("", "classes")}, ge=1
    )
    domain_share: float = key(
        1.0,
        "share of each domain that is used; a value above 1 is a number of examples",
        {"partition": ("domain",)},
        gt=0,
    )
    held_out_clients: str = key(
        "",
        "clients that never train, but are tested in each tested round: a comma list of"
        " names, or a number N for the last N clients (the client with the name N is"
        " `N,`)",
    )


class Model(Group):
    """The network."""

    group = "model"

    model: str = key(
        "mlp",
        "model (`fedbn-flwr list models`), torchvision:NAME, or your own module:function",
    )
    norm: str = key("batch", "normalisation of the model (`fedbn-flwr list norms`)")
    norm_groups: int = key(
        2, "groups of GroupNorm", {"norm": ("group", "group+ws")}, ge=1
    )
    feature_norm: Literal["", "sqrt-d", "1"] = key(
        "",
        "length to which the features before the classifier are scaled (FN): sqrt-d (the"
        " root of their number) or 1",
    )
    init: str = key(
        "",
        "initial weights, loaded by name and shape: the absolute path of a .safetensors,"
        " .pt or .pth file. Only the server reads it",
    )
    bn_momentum: float = key(
        0.1,
        "momentum of BN's running statistics, torch's convention",
        {"norm": ("batch",)},
        gt=0,
        le=1,
    )


class Rounds(Group):
    """The rounds. ``Params`` declares more keys of this group."""

    group = "rounds"

    num_server_rounds: int = key(20, "rounds R, counted from 1", ge=1)
    fraction_train: float = key(
        1.0, "share of the clients that train in each round", gt=0, le=1
    )
    round_timeout: float = key(
        0.0,
        "seconds to wait for the replies of a round, and for nodes; 0 means 3600, or no"
        " limit in process",
        ge=0,
    )
    early_stopping: int = key(
        0,
        "end the run if the score on the validation examples has not improved for K"
        " tested rounds; the result is the state after the best round. Needs"
        " validation-share; 0 disables it",
        ge=0,
    )


class TrainingKeys(Group):
    """The training of a client in a round. ``Params`` declares more of its keys."""

    group = "local training"

    local_steps: int = key(
        0,
        "number E of steps per round, on batches drawn with replacement; a batch at"
        " least as large as a client's data contains all of them",
        ge=0,
    )
    local_epochs: int = key(
        1,
        "number E of passes over the local data per round; excludes local-steps",
        ge=0,
    )
    batch_size: int = key(
        32, "examples per step; 0 uses the whole local data set", ge=0
    )
    learning_rate: float = key(0.1, "learning rate of the optimizer in round 1", gt=0)
    lr_decay_at: str = key(
        "", "comma list of decays: after a round (int), a fraction of R, or `freeze`"
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
        _WITHOUT_LOOP,
    )
    sgd_momentum: float = key(
        0.0,
        "momentum of SGD; see momentum-scope",
        {"optimizer": ("sgd",), **_WITHOUT_LOOP},
        ge=0,
        lt=1,
    )
    weight_decay: float = key(
        0.0, "L2 coefficient on every trainable parameter", _WITHOUT_LOOP, ge=0
    )
    loop: str = key(
        "",
        "training loop of your own, module:function, for the steps of a round; empty uses"
        " the loop of the package",
    )
    device: str = key(
        "auto", "auto, cpu, cuda or cuda:N; auto selects cuda if available"
    )
    amp: bool = key(
        False, "bfloat16 autocast in the forward passes of training", _WITHOUT_LOOP
    )
    torch_threads: int = key(
        1, "CPU threads of torch per client (changes the last bits)", ge=1
    )


class Tests(Group):
    """The tests. ``Params`` declares more keys of this group."""

    group = "tests"

    metrics: str = key(
        "",
        "comma list of metrics of every test, in addition to the metric of the task."
        " Early stopping, tuning, tables and reports use the first, and it may be loss;"
        " empty selects the metric of the task (accuracy; segmentation miou, multi-label"
        " auroc, regression mae)."
        " Others: balanced-accuracy, macro-f1, auprc; dice; rmse",
    )
    test_bn: Literal["", "batch", "mix"] = key(
        "",
        "BatchNorm statistics from the test inputs, in tests that end in -test-bn and in"
        " a further test of held-out clients: batch uses each test batch, mix combines it"
        " with the stored statistics, weighted like 16 examples",
        {"norm": ("batch",)},
    )


class Files(Group):
    """The output files."""

    group = "files"

    out: str = key(
        "",
        "output folder; empty selects runs/... (under Flower FLWR_HOME/fedbn-runs/RUN_ID)",
    )
    checkpoint_every: int = key(
        10,
        "rounds between checkpoints. They are also written every 20 seconds, before"
        " round 1, at the end and at a signal; 0 disables them",
        ge=0,
    )
    state_dir: str = key(
        "",
        "absolute path of the folder on each node for the local state of its clients;"
        " `out` selects OUT/checkpoint/clients (set by `fedbn-flwr run`); empty keeps"
        " the state in memory. A node's own `state-dir` takes precedence",
    )
    resume: bool = key(
        False,
        "continue from the last checkpoint in `out`; start a run if the folder is empty",
    )


# A type checker sees the settings of all methods and protections by inheritance. At run
# time, the fields are made from the declarations of the methods and protections, so
# that each setting is declared only there. The table ``generated_keys.md`` shows where
# each of them is declared, checked and used.
if TYPE_CHECKING:

    class SettingsOfMethods(Params, DPSettings):
        """The settings of all methods and protections."""

else:
    _PROTECTIONS = {
        name: (field.annotation, field)
        for name, field in DPSettings.model_fields.items()
    }
    SettingsOfMethods = create_model(
        "SettingsOfMethods", __base__=Group, **settings_of_methods(), **_PROTECTIONS
    )


class Fields(
    MethodKeys,
    Data,
    Clients,
    Model,
    Rounds,
    TrainingKeys,
    Tests,
    SettingsOfMethods,
    Files,
):
    """All keys of a run, each checked separately."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        alias_generator=lambda name: name.replace("_", "-"),
        allow_inf_nan=False,
        coerce_numbers_to_str=True,  # Flower's --run-config reads the text 5 as a number
    )

    def __eq__(self, other: object) -> bool:
        """Return whether all settings are equal, with their types.

        For ``freeze-at``, 1 is a round, and 1.0 is all rounds.
        """
        return super().__eq__(other) and repr(self) == repr(other)

    @property
    def protected(self) -> bool:
        """Whether dp hides single clients. Reports then omit their counts."""
        return self.dp != "off"

    @classmethod
    def keys(cls, group: str) -> list[str]:
        """Return the keys of a group, in order."""
        names: list[str] = []
        for kind in cls.__mro__:
            if issubclass(kind, Group) and vars(kind).get("group") == group:
                names += kind.model_fields
        # The settings of methods and protections are not in a class of their group.
        # Each of them declares its group.
        for name, field in cls.model_fields.items():
            if extras_of(field).get("group") == group:
                names.append(name)
        return [name.replace("_", "-") for name in names]

    @field_validator("*", mode="before")
    @classmethod
    def _one_kind(cls, value: Any, info: ValidationInfo) -> Any:
        wanted = cls.model_fields[str(info.field_name)].annotation
        # Pydantic would read true as 1 and false as 0.
        if isinstance(value, bool) and wanted is not bool:
            raise ValueError(f"{str(value).lower()} is neither a number nor text")
        # A key that may be a number or a text would keep the text of a number.
        if isinstance(value, str) and isinstance(wanted, UnionType):
            spelled = number(value)
            return value if spelled is None else spelled
        return value

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
        """Expand ``~`` at the start of a path, even after a prefix ("folder:~/data").

        The shell does not expand it within a setting.
        """
        if ":~" not in value:
            return os.path.expanduser(value)
        kind, _, path = value.rpartition(":")
        return f"{kind}:{os.path.expanduser(path)}"


def only_if_of(kind: type[BaseModel], key: str) -> dict[str, Any]:
    """Return the values of other keys without which a key has no effect."""
    field = kind.model_fields[key.replace("-", "_")]
    conditions: dict[str, Any] = extras_of(field).get("only_if", {})
    return conditions


def defaults_of(kind: type[Fields]) -> dict[str, Any]:
    """Return the default of each key."""
    fields = kind.model_fields.items()
    return {field.alias or name: field.default for name, field in fields}


ONLY_IF: Mapping[str, dict[str, Any]] = {
    key: only_if_of(Fields, key) for key in defaults_of(Fields)
}
"""The condition for the effect of a key."""
USERS: Mapping[str, list[str]] = {
    key: methods_with(key.replace("-", "_")) for key in defaults_of(Fields)
}
"""The methods that have a key, or [] if every method has it."""
