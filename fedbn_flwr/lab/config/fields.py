"""The keys of a run that are no method's: each with its type, default, limits and meaning."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, ValidationInfo, create_model, field_validator

from fedbn_flwr.batchnorm.adaptation import TestBNMode
from fedbn_flwr.lab.config.method_settings import fields_of, method_fields
from fedbn_flwr.lab.config.reading import refuse_bool
from fedbn_flwr.privacy.settings import DPSettings, MaskSettings
from fedbn_flwr.server.method import Role
from fedbn_flwr.server.params import Params, setting
from fedbn_flwr.strategies import METHODS, STRATEGIES
from fedbn_flwr.training.freezing import FrozenBN
from fedbn_flwr.training.settings import OptimizerName, Sampling

__all__ = ["GROUPS", "STATE_IN_OUT", "Fields", "MethodSettings"]

STATE_IN_OUT = "out"  # value of state-dir for clients on the server's machine: a folder in the run's folder
GROUPS = ("what", "own data and models", "rounds", "local training", "methods", "privacy", "files")

if TYPE_CHECKING:

    class MethodSettings(Params, DPSettings, MaskSettings):
        """The settings of all methods and protections."""

else:
    _PRIVACY = fields_of(DPSettings) | fields_of(MaskSettings)
    _LATER = ConfigDict(defer_build=True)  # what is validated is ``Config`` alone
    MethodSettings = create_model("MethodSettings", __config__=_LATER, **method_fields(STRATEGIES.values()), **_PRIVACY)


def _key(group: str, default: Any, meaning: str, **limits: Any) -> Any:
    return setting(default, meaning, group, **limits)


def _of_role(role: Role) -> str:
    return ", ".join(name for name, method in METHODS.items() if method.role == role)


class Fields(MethodSettings):
    """The keys of the methods and protections, and these. A key is the kebab-case name of its field."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        defer_build=True,
        alias_generator=lambda name: name.replace("_", "-"),
        allow_inf_nan=False,
        coerce_numbers_to_str=True,  # YAML and the command line know no difference
    )

    strategy: str = _key("what", "fedavg", "method; `fedbn-flwr list strategies`")
    norm: str = _key("what", "batch", "normalisation of the model; `fedbn-flwr list norms`")
    norm_groups: int = _key("what", 2, "groups of `norm=group`", ge=1)
    feature_norm: Literal["", "sqrt-d", "1"] = _key(
        "what",
        "",
        "length of the features before the classifier (FN): sqrt-d, the root of their number; 1; empty = as they are",
    )
    model: str = _key("what", "mlp", "model; `fedbn-flwr list models`, torchvision:NAME, your own module:function")
    num_classes: int = _key("what", 0, "classes of the model; 0 = the data set's", ge=0)
    dataset: str = _key(
        "what",
        "digits",
        "data set; `fedbn-flwr list datasets`; data of your own by their format, or your own module:function",
    )
    image_size: int = _key(
        "what",
        0,
        "height of the images, pixels; 0 = as published, or the height that the model needs (torchvision's: 64, but "
        "most classifiers work at 32). Own images become squares",
        ge=0,
    )
    data_dir: str = _key("what", "", "absolute folder of the data set's files; not needed for embedded data")
    partition: str = _key(
        "what",
        "",
        "split over the clients; `fedbn-flwr list partitions`; empty = natural for own data with clients, iid for "
        "other own data, else classes",
    )
    partition_alpha: float = _key("what", 0.5, "concentration of `partition=dirichlet`", gt=0)
    shards_per_client: int = _key("what", 0, "shards of a client (`unbalanced-shards`: at most); 0 = 2, or 30", ge=0)
    domain_share: float = _key("what", 1.0, "`partition=domain`: share of a domain used; above 1 a number", gt=0)
    classes_per_client: int = _key("what", 2, "classes each client holds under `partition=classes`", ge=1)
    num_clients: int = _key(
        "what",
        0,
        "clients; in process 0 = 5, or the number of groups of `natural` and `domain`; under Flower the size of the "
        "federation, 0 = any size",
        ge=0,
    )
    task: str = _key(
        "own data and models",
        "",
        "learning task: targets, loss and metrics; empty = the data set's own. Only data of your own have a choice",
    )
    metrics: str = _key(
        "own data and models",
        "",
        "comma list of metrics of every test, beside the task's own. Early stopping, tuning, tables and reports go by "
        "the first, which may be loss; empty = the task's own (accuracy; segmentation miou, multi-label auroc, "
        "regression mae). Others: balanced-accuracy, macro-f1, sensitivity-at-specificity:0.9, auprc, brier, ece; "
        "dice; rmse",
    )

    test_share: float = _key(
        "own data and models", 0.2, "share of own data that is the test part, where the data have none", gt=0, lt=1
    )
    validation_share: float = _key(
        "own data and models",
        0.0,
        "share of each client's training examples that is never trained on, stratified by class: its tests are "
        "`validation-*` of each tested round; early-stopping and fedbs use them",
        ge=0,
        lt=1,
    )

    held_out_clients: str = _key(
        "own data and models",
        "",
        "clients that never train and are tested in each tested round: a comma list of names, or a number (the last; a "
        "client that is called so takes precedence)",
    )
    init: str = _key(
        "own data and models",
        "",
        "initial weights, loaded by name and shape: an absolute path of a .safetensors, .pt or .pth file, or "
        "torchvision, torchvision:NAME, timm or smp (published weights, downloaded); read by the server alone",
    )
    early_stopping: int = _key(
        "own data and models",
        0,
        "K > 0: the run ends when the score on the validation examples has not improved for K tested rounds, and its "
        "result is the state after the best round; needs validation-share",
        ge=0,
    )

    train_only: str = _key(
        "own data and models",
        "",
        "comma list of paths of modules (`layer4,fc`): only their parameters train, the others are frozen; empty = all "
        "train",
    )
    frozen_bn: FrozenBN = _key(
        "own data and models",
        "eval",
        "BatchNorm outside train-only: eval = normalises with its running statistics, which stay as they are, train = "
        "with the batch's, and the running ones move as the method says",
    )

    num_server_rounds: int = _key("rounds", 20, "rounds R, counted from 1", ge=1)
    fraction_train: float = _key("rounds", 1.0, "share of the clients that train in a round", gt=0, le=1)
    fraction_evaluate: float = _key("rounds", 1.0, "share of the clients that evaluate", gt=0, le=1)
    test_bn: TestBNMode = _key(
        "rounds",
        "",
        "BatchNorm statistics of the tests of eval-on that end in -test-bn, and of one more test of held-out clients, "
        "each from its own test inputs: batch = each test batch's, mix = these with the stored ones, which weigh as "
        "much as 16 examples; empty = no such test",
    )
    round_timeout: float = _key(
        "rounds",
        0.0,
        "seconds to wait for the replies of a round, and for nodes; 0 = 3600, and in process as long as it takes",
        ge=0,
    )
    local_part: str = _key(
        "methods",
        "",
        f"the method whose local parts a combination has: {_of_role('local-part')}; empty = the strategy's",
    )
    client_hooks: str = _key(
        "methods",
        "",
        f"comma list of methods whose local training is added to the strategy: {_of_role('client-hooks')}",
    )
    server_step: str = _key(
        "methods",
        "",
        f"the method whose server step a combination has: {_of_role('server-step')}; empty = the strategy's",
    )
    local_steps: int = _key("local training", 0, "E steps per round; see sampling", ge=0)
    local_epochs: int = _key(
        "local training", 1, "E passes over the local data per round; not together with local-steps", ge=0
    )
    sampling: Sampling = _key(
        "local training",
        "with-replacement",
        "how the batches of local-steps are drawn; a batch of at least the size of a client's data is all of them",
    )
    batch_size: int = _key("local training", 32, "examples per step; 0 = the whole local data set", ge=0)
    augment: str = _key(
        "local training",
        "",
        "comma list of `cropN` (pad N, crop back), `flip`, `resized-crop`, `color-jitter`, `auto-augment`, "
        "`rand-augment`, `trivial-augment`; empty = none",
    )
    learning_rate: float = _key("local training", 0.1, "learning rate of the optimizer in round 1", gt=0)
    lr_decay_at: str = _key("local training", "", "comma list: decay after a round (int), a fraction of R, or `freeze`")
    lr_decay_factor: str = _key("local training", "0.1", "one factor, or a comma list as long as lr-decay-at")
    optimizer: OptimizerName = _key(
        "local training",
        "sgd",
        "torch's SGD, Adam or AdamW, new in each round; scaffold and momentum-scope need sgd",
    )
    sgd_momentum: float = _key("local training", 0.0, "momentum of SGD; see momentum-scope", ge=0, lt=1)
    weight_decay: float = _key("local training", 0.0, "L2 coefficient on every trainable parameter", ge=0)
    bn_momentum: float = _key(
        "local training", 0.1, "momentum of BN's running statistics, torch's convention", gt=0, le=1
    )
    device: str = _key("local training", "auto", "auto, cpu, cuda or cuda:N; auto = cuda if available")
    amp: bool = _key("local training", False, "bfloat16 autocast in the forward passes of training")
    torch_threads: int = _key("local training", 1, "CPU threads of torch per client (changes the last bits)", ge=1)

    out: str = _key("files", "", "output folder; empty = runs/... (under Flower: FLWR_HOME/fedbn-runs/RUN_ID)")
    tensorboard: bool = _key(
        "files", False, "scalars of each round as event files in OUT/tensorboard; needs the extra `tensorboard`"
    )
    checkpoint_every: int = _key(
        "files",
        10,
        "checkpoint before round 1, every so many rounds or 20 seconds, at the end and at a signal; 0 = none",
        ge=0,
    )
    state_dir: str = _key(
        "files",
        "",
        "absolute folder on each node in which clients keep their part; `out` = OUT/checkpoint/clients (set by "
        "`fedbn-flwr run`); empty = in memory; a node's own `state-dir` takes precedence",
    )
    series: str = _key(
        "files",
        "",
        "experiment id: runs with the same id continue with the parts that clients kept; empty = this run only",
    )
    resume: bool = _key("files", False, "continue from the last checkpoint in `out`; with an empty folder start a run")

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool(cls, value: Any, info: ValidationInfo) -> Any:
        name = info.field_name or ""
        return refuse_bool(name, value, getattr(cls.model_fields[name].annotation, "__name__", ""))

    @field_validator("dataset", "data_dir", "init", "state_dir", "out", "fedtan_tls_dir", mode="after")
    @classmethod
    def _home(cls, value: str) -> str:
        """Read ``~`` at the begin of a path, also after a prefix: no shell does it within a setting."""
        kind, colon, path = value.rpartition(":") if ":~" in value else ("", "", value)
        return kind + colon + os.path.expanduser(path)
