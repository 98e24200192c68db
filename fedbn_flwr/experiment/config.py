"""The typed config of a run: the same keys in YAML, ``--set``, ``--run-config`` and ``[tool.flwr.app.config]``.

The settings of the methods come from the strategies' ``Params``: the key ``freeze-at``, for example, is
``FixBNParams.freeze_at`` in ``strategies/fixbn.py``. ``docs/config.md`` names the methods of each key.
"""

from __future__ import annotations

import difflib
import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import yaml
from pydantic import ConfigDict, ValidationError, ValidationInfo, create_model, field_validator, model_validator

from fedbn_flwr.batchnorm.adaptation import TEST_BN_MODES, TestBN, TestBNMode
from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.data import (
    DATASETS,
    MAX_BYTES,
    PARTITIONS,
    Augment,
    DatasetInfo,
    OwnData,
    Standardise,
    decided_by_records,
    is_own,
    own_info,
)
from fedbn_flwr.data.shared import DataKey, adopted
from fedbn_flwr.errors import ConfigError, FedBNError, unknown_name
from fedbn_flwr.experiment.method_settings import fields_of, method_fields, methods_with, own_default
from fedbn_flwr.experiment.yaml_file import UNREADABLE, read_yaml
from fedbn_flwr.messages.protocol import SERIES_PATTERN
from fedbn_flwr.models import MODELS, input_shape, model_info
from fedbn_flwr.norms import NORMS, FeatureScale
from fedbn_flwr.privacy import differential, masked_sums
from fedbn_flwr.privacy.differential import DPSettings
from fedbn_flwr.privacy.masked_sums import MaskSettings
from fedbn_flwr.privacy.record_level import RecordLevel
from fedbn_flwr.privacy.record_server import TWO_NOISES, RecordDPSettings, carried_over
from fedbn_flwr.server.method import TEST_BN, Params, Role, RunSettings, setting, tests_in
from fedbn_flwr.strategies import STRATEGIES, FedAvg, combined
from fedbn_flwr.strategies.fixbn import Freezing, freeze_round
from fedbn_flwr.training.freezing import FrozenBN
from fedbn_flwr.training.memory_format import MemoryFormat
from fedbn_flwr.training.settings import LearningRate, OptimizerName, Sampling, share_of
from fedbn_flwr.training.tasks import TASKS, Task

__all__ = ["CENTRALIZED", "EVALUATIONS", "STATE_IN_OUT", "Config", "Scalar", "read_overrides", "split", "state_in_out"]

Scalar = str | int | float | bool
CENTRALIZED = "centralized"
EVALUATIONS = (
    *("global", "global-batch-statistics", "personal-own", "personal-global", "averaged-bn", "recalibrated"),
    *("global-test-bn", "averaged-bn-test-bn"),
)
STATE_IN_OUT = "out"  # value of state-dir for clients on the server's machine: a folder in the run's folder
GROUPS = ("what", "own data and models", "rounds", "local training", "methods", "privacy", "files")
RENAMED = {"fedtan-exchange": "fedtan-transport"}
"""Old name to new name of keys; YAML, ``--set`` and checkpoints may still have the old name."""

_OF_RECORDS = ("dp-noise-multiplier", "dp-target-epsilon", "dp-clipping-norm")
# The service `cli` of docker-compose.yml sets these in every run config; a run that cannot use them goes without.
_OF_THE_COMPOSE_FILE = ("fedtan-transport", "fedtan-bind", "fedtan-address", "fedtan-tls-dir")
_OF_A_FEDERATION = (
    *("fraction_train", "fraction_evaluate", "min_replies", "round_timeout", "variance", "momentum_scope", "agc"),
    *("recalibrate", "local_part", "client_hooks", "server_step", "state_dir", "series", "checkpoint_every"),
    "watch_statistics",
)

logger = logging.getLogger("flwr")

if TYPE_CHECKING:

    class _MethodSettings(Params, DPSettings, MaskSettings, RecordDPSettings): ...

else:
    _PRIVACY = fields_of(DPSettings) | fields_of(MaskSettings) | fields_of(RecordDPSettings)
    _MethodSettings = create_model("_MethodSettings", **method_fields(STRATEGIES.values()), **_PRIVACY)


def _key(group: str, default: Any, meaning: str, **limits: Any) -> Any:
    return setting(default, meaning, group, **limits)


class Config(_MethodSettings):
    """All settings of a run. Keys are the kebab-case names of the fields; values are scalars, lists are comma strings.

    "Not set" is "" for text and 0 for numbers. ``docs/config.md`` is the table of this class.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        alias_generator=lambda name: name.replace("_", "-"),
        allow_inf_nan=False,
    )

    strategy: str = _key("what", "fedavg", "method; `fedbn-flwr list strategies`")
    norm: str = _key("what", "batch", "normalisation of the model; `fedbn-flwr list norms`")
    norm_groups: int = _key("what", 2, "groups of `norm=group`", ge=1)
    wsconv_gain: bool = _key("what", True, "learnable gain per channel of `norm=wsconv`")
    activation: str = _key("what", "relu", "activation for which `norm=wsconv` scales: relu or identity")
    renorm_rmax: float = _key("what", 3.0, "r_max of `norm=batch-renorm`", ge=1)
    renorm_dmax: float = _key("what", 5.0, "d_max of `norm=batch-renorm`", ge=0)
    feature_norm: bool = _key(
        "what", False, "the features before the classifier get a fixed length (FN); beside any norm but fixup"
    )
    feature_norm_scale: FeatureScale = _key(
        "what", "sqrt-d", "that length, in units of the root of their number: sqrt-d; or 1"
    )
    model: str = _key("what", "mlp", "model; `fedbn-flwr list models`, torchvision:NAME, your own module:function")
    num_classes: int = _key("what", 0, "classes of the model; 0 = the data set's", ge=0)
    dataset: str = _key("what", "digits", "data set; `fedbn-flwr list datasets`")
    image_size: int = _key(
        "what",
        0,
        "height of the images, pixels; 0 = as published, or the height that the model needs (torchvision's: 64, but "
        "most classifiers work at 32)",
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
    num_shards: int = _key("what", 0, "shards of `partition=shards`, `unbalanced-shards`; 0 = the natural number", ge=0)
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
        "comma list of metrics beside the task's own, in every test. classification: balanced-accuracy, macro-f1, "
        "auroc, auprc; multi-label: balanced-accuracy",
    )

    label_column: str = _key("own data and models", "", "`csv:`, `hf:`: column of the target; `csv:` also a comma list")
    client_column: str = _key("own data and models", "", "`csv:`, `hf:`: column with the client of each row")
    group_column: str = _key(
        "own data and models", "", "`csv:`, `hf:`: column, such as the patient, whose rows no split separates"
    )
    split_column: str = _key("own data and models", "", "`csv:`: column with train or test (0 or 1) for each row")
    feature_columns: str = _key(
        "own data and models",
        "",
        "`csv:`, `hf:`: comma list of columns, with the categories of text if need be, `age,sex:F|M`; empty = all "
        "others",
    )
    positive_values: str = _key(
        "own data and models", "", "comma list of targets that count as 1, or `>NUMBER`; all others count as 0"
    )
    class_names: str = _key(
        "own data and models",
        "",
        "comma list: names of the classes (texts of the target, class folders) in the order of their numbers; empty = "
        "those found, in the order of the alphabet",
    )
    missing: Literal["refuse", "mean"] = _key(
        "own data and models", "refuse", "missing features: refuse, or mean = the mean of the training examples"
    )
    standardise: Standardise = _key(
        "own data and models",
        "",
        "(x - mean) / std of inputs: federated (sums over all clients' training examples), local (each client's own), "
        "none; empty = federated, and for images the data set's constants (own images: ImageNet's)",
    )
    skip_unreadable: bool = _key(
        "own data and models", False, "leave out image files that cannot be read, and list them"
    )
    test_share: float = _key(
        "own data and models", 0.2, "share of own data that is the test part, where the data have none", gt=0, lt=1
    )
    cache_gib: float = _key(
        "own data and models",
        MAX_BYTES / 2**30,
        "GiB of decoded image files in memory; sets that need more stay on the disk",
        ge=0,
    )
    data_workers: int = _key(
        "own data and models",
        -1,
        "processes that decode images on the disk, for each process with clients; -1 = the cores, if the clients are "
        "in one process, else 0",
        ge=-1,
    )
    mlp_hidden: str = _key("own data and models", "", "comma list: widths of `model=mlp`'s hidden layers; empty = 30")
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
        "clients that never train and are tested in each tested round: a number (the last) or a comma list of names",
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
    test_bn: Literal["", TestBNMode] = _key(
        "rounds",
        "",
        "BatchNorm statistics of the tests of eval-on that end in -test-bn, and of one more test of held-out clients, "
        "each from its own test inputs: batch = each test batch's, mix = these with the stored ones, momentum = a "
        "moving average of theirs, full = of all test inputs; empty = no such test",
    )
    test_bn_prior: float = _key(
        "rounds", 16.0, "test-bn=mix: N, the stored statistics weigh as much as so many examples", ge=0
    )
    test_bn_alpha: float = _key(
        "rounds", -1.0, "test-bn=mix: share of the stored statistics, in [0, 1]; -1 = by test-bn-prior", ge=-1, le=1
    )
    test_bn_tau: float = _key("rounds", 0.9, "test-bn=momentum: share of the batches before", ge=0, lt=1)
    test_bn_batch_size: int = _key("rounds", 0, "examples per batch of these tests; 0 = as in the others", ge=0)
    round_timeout: float = _key(
        "rounds",
        0.0,
        "seconds to wait for the replies of a round, and for nodes; 0 = 3600, and in process as long as it takes",
        ge=0,
    )
    local_part: str = _key(
        "methods", "", "fedbn, silobn or mtfl: the method whose local parts a combination has; empty = the strategy's"
    )
    client_hooks: str = _key(
        "methods",
        "",
        "comma list of methods whose local training is added to the strategy: fedprox, scaffold, staticbn, fixbn, "
        "fbn, hbn, fedtan, fedtan2",
    )
    server_step: str = _key(
        "methods",
        "",
        "fedavgm, fedadam, fedyogi or fedadagrad: the method whose server step a combination has; empty = the "
        "strategy's",
    )
    local_steps: int = _key("local training", 0, "E steps per round; see sampling", ge=0)
    local_epochs: int = _key(
        "local training", 1, "E passes over the local data per round; not together with local-steps", ge=0
    )
    sampling: Sampling = _key(
        "local training", "with-replacement", "how the batches of local-steps are drawn, see training.settings"
    )
    batch_size: int = _key("local training", 32, "examples per step; 0 = the whole local data set", ge=0)
    augment: str = _key(
        "local training",
        "",
        "comma list of `cropN` (pad N, crop back), `flip`, `resized-crop`, `color-jitter`, `auto-augment`, "
        "`rand-augment`, `trivial-augment`; empty = none",
    )
    learning_rate: float = _key("local training", 0.1, "learning rate of the optimizer in round 1", gt=0)
    learning_rate_schedule: Literal["", "constant", "step", "cosine"] = _key(
        "local training",
        "",
        "learning rate over the rounds; step = lr-decay-at, cosine = to 0 at the end of round R; empty = step if "
        "lr-decay-at is set, else constant",
    )
    learning_rate_warm_up: int = _key(
        "local training", 0, "rounds W of a linear warm-up: the rate of round r <= W is multiplied by r / (W + 1)", ge=0
    )
    lr_decay_at: str = _key("local training", "", "comma list: decay after a round (int), a fraction of R, or `freeze`")
    lr_decay_factor: str = _key("local training", "0.1", "one factor, or a comma list as long as lr-decay-at")
    optimizer: OptimizerName = _key(
        "local training",
        "sgd",
        "torch's SGD, Adam or AdamW, new in each round; scaffold and momentum-scope need sgd",
    )
    sgd_momentum: float = _key("local training", 0.0, "momentum of SGD; see momentum-scope", ge=0, lt=1)
    weight_decay: float = _key("local training", 0.0, "L2 coefficient on every trainable parameter", ge=0)
    gradient_clip_norm: float = _key(
        "local training",
        0.0,
        "largest norm of the gradient of all trainable parameters together; 0 = any. Clipped with penalties, before "
        "SCAFFOLD's correction, weight decay and momentum; not together with agc",
        ge=0,
    )
    bn_momentum: float = _key(
        "local training", 0.1, "momentum of BN's running statistics, torch's convention", gt=0, le=1
    )
    device: str = _key("local training", "auto", "auto, cpu, cuda or cuda:N; auto = cuda if available")
    amp: bool = _key("local training", False, "bfloat16 autocast in the forward passes of training")
    memory_format: MemoryFormat = _key(
        "local training",
        "auto",
        "of images and 4-d weights; auto = channels-last for models with 2-d convolutions (changes the last bits)",
    )
    compile: bool = _key("local training", False, "torch.compile the model of each client process (some 20 s, once)")
    torch_threads: int = _key("local training", 1, "CPU threads of torch per client (changes the last bits)", ge=1)

    out: str = _key("files", "", "output folder; empty = runs/... (under Flower: FLWR_HOME/fedbn-runs/RUN_ID)")
    tensorboard: bool = _key(
        "files", False, "scalars of each round as event files in OUT/tensorboard; needs the extra `tensorboard`"
    )
    wandb: str = _key(
        "files", "", "Weights & Biases: PROJECT or ENTITY/PROJECT that gets each round; needs the extra `wandb`"
    )
    mlflow: str = _key(
        "files", "", "MLflow: tracking URI, or an absolute folder, that gets each round; needs the extra `mlflow`"
    )
    checkpoint_every: int = _key(
        "files",
        10,
        "checkpoint before round 1, after every so many rounds and after the last; 0 = none",
        ge=0,
    )
    watch_statistics: int = _key(
        "files",
        0,
        "write the BatchNorm statistics of every so many rounds, and of the last, to OUT/statistics.jsonl: how far "
        "those of each client are from the global ones, and how these change; 0 = none",
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
        """Refuse true and false for a number: pydantic would read them as 1 and 0."""
        wanted = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and wanted is not bool:
            hint = """ (YAML reads yes, no, on and off so: use quotes, "'yes'")""" if wanted is str else ""
            raise ValueError(f"{str(value).lower()} is neither a number nor text{hint}")
        return value

    @model_validator(mode="before")
    @classmethod
    def _records(cls, values: Any) -> Any:
        """Read ``dp=record`` as ``record-dp=true``, and the noise and the norm beside it as those of records."""
        if not isinstance(values, Mapping) or values.get("dp") != "record":
            return values
        defaults = {field.alias: field.default for field in cls.model_fields.values()}
        own = {key: values[key] for key in _OF_RECORDS if key in values and values[key] != defaults[key]}
        others = {key: value for key, value in values.items() if key not in own}
        return {**others, "dp": "off", "record-dp": True, **{f"record-{key}": value for key, value in own.items()}}

    @field_validator("dp", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        """Read YAML's ``off``, which is false, and the name of an older version."""
        return "off" if value is False or value == "none" else value

    @field_validator("lr_decay_factor", "lr_decay_at", "held_out_clients", "mlp_hidden", mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value

    @field_validator("held_out_clients")
    @classmethod
    def _none(cls, value: str) -> str:
        return "" if value.strip() == "0" else value

    @model_validator(mode="after")
    def _together(self) -> Self:
        """Check the keys together, and report all problems at once."""
        problems: list[str] = []
        _try(problems, lambda: self._known("strategy", self.strategy, [*STRATEGIES, CENTRALIZED]))
        for role in get_args(Role):
            allowed = [name for name, method in STRATEGIES.items() if method.role == role]
            for name in self._added(role):
                _try(problems, functools.partial(self._known, role, name, allowed))
        names = self._methods()
        if twice := sorted({name for name in names if names.count(name) > 1}):
            problems.append(f"{', '.join(twice)}: named twice in strategy, local-part, client-hooks and server-step")
        _try(problems, lambda: self._known("norm", self.norm, NORMS))
        found: list[DatasetInfo] = []
        _try(problems, lambda: found.append(self.data_info()))
        if found:
            _try(problems, lambda: self._known("partition", self.split_name(), PARTITIONS))
        _try(problems, lambda: self._one_task(found))
        _try(problems, lambda: Augment.parse(self.augment))
        _try(problems, self.decays)
        _try(problems, self.hidden)
        _try(problems, lambda: [self._known("eval-on", name, EVALUATIONS) for name in split(self.eval_on)])
        _try(problems, self.test_statistics)
        if not self.test_bn and (asked := [name for name in split(self.eval_on) if name.endswith(TEST_BN)]):
            problems.append(f"eval-on={','.join(asked)} needs test-bn: {', '.join(TEST_BN_MODES)}")
        classes = found[0].num_classes if found and not is_own(self.dataset) else 0
        if self.partition in ("", "classes") and classes and self.classes_per_client > classes:
            problems.append(
                f"classes-per-client={self.classes_per_client} is more than the {classes} classes of "
                f"dataset={self.dataset}; use 1 to {classes}"
            )
        if found and found[0].task.by_pixel:
            moved = [name for name in self._each() if name.endswith("-augment")]
            problems += [f"augment: {name} would move the image and not the classes of its pixels" for name in moved]
        if self.standardise == "none" and self.missing == "mean":
            problems.append(
                "missing=mean needs standardise=federated or local: the mean is that of the training examples"
            )
        if self.num_classes and self.num_classes < classes:
            problems.append(f"num-classes={self.num_classes} is fewer than the {classes} of dataset={self.dataset}")
        if not problems and self.strategy != CENTRALIZED:
            _try(problems, lambda: problems.extend(self.method().conflicts(self.params(), self.run_settings())))
        if not problems and (self.dp != "off" or self.record_dp):
            _try(problems, lambda: problems.extend(self._dp_problems()))
        if not problems and self.masked_sums:
            _try(problems, lambda: problems.extend(self._mask_problems()))
        if self.early_stopping and not self.validation_share:
            problems.append(
                f"early-stopping={self.early_stopping} needs validation-share above 0: the score is that on examples "
                "that no client trains on"
            )
        if self.early_stopping and not self.checkpoint_every:
            problems.append(
                f"early-stopping={self.early_stopping} goes back to the checkpoint of the best round: set "
                "checkpoint-every above 0"
            )
        if self.learning_rate_schedule == "step" and not self.lr_decay_at:
            problems.append("learning-rate-schedule=step needs lr-decay-at")
        if self.learning_rate_warm_up >= self.num_server_rounds:
            problems.append(
                f"learning-rate-warm-up={self.learning_rate_warm_up} must be below "
                f"num-server-rounds={self.num_server_rounds}"
            )
        if not self.local_steps and not self.local_epochs:
            problems.append("local-steps and local-epochs are both 0: nothing to train; set one of them above 0")
        if self.series and not SERIES_PATTERN.fullmatch(self.series):
            problems.append(f"series={self.series!r} must be 1 to 64 letters, digits, '.', '-' or '_', no '.' in front")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def test_statistics(self) -> TestBN | None:
        """Return the BatchNorm statistics of tests that end in -test-bn; None without ``test-bn``.

        Raises:
            ConfigError: ``test-bn-alpha`` is between -1 and 0.
        """
        if not self.test_bn:
            return None
        alpha = None if self.test_bn_alpha == -1 else self.test_bn_alpha
        size = self.test_bn_batch_size or self.learning_task().test_batch
        return TestBN(self.test_bn, self.test_bn_prior, alpha, self.test_bn_tau, size)

    def dp_settings(self) -> DPSettings:
        """Return the settings of client-level differential privacy; with record-dp the budget is not the clients'."""
        values: dict[str, Any] = {name: getattr(self, name) for name in DPSettings.model_fields}
        if self.record_dp:
            values["dp_max_epsilon"] = 0.0
        return DPSettings(**values)

    def record_level(self) -> RecordLevel | None:
        """Return the settings of DP-SGD in the clients; None without it."""
        if not self.record_dp:
            return None
        return RecordLevel(
            None if self.record_dp_target_epsilon else self.record_dp_noise_multiplier,
            self.record_dp_clipping_norm,
            publishes_metrics=self.dp_metrics == "published",
            frozen_only=self.dp != "off",
        )

    def _dp_problems(self) -> list[str]:
        """Return what of this run goes round the noise, or does not fit it."""
        asked = f"dp={self.dp}" if self.dp != "off" else "record-dp=true"
        if self.strategy == CENTRALIZED:
            return [f"{asked}: strategy=centralized has no clients"]
        found = differential.conflicts(self.dp_settings())
        beside = self._made().beside_updates().values()
        found += [f"strategy {self.title!r} with {asked}: {what}" for what in beside]
        if self.dp != "off" and self.min_replies > 1:
            found.append(
                f"min-replies={self.min_replies}: a round with noise has a result whoever answers; leave it out"
            )
        if self.early_stopping:
            found.append(f"early-stopping={self.early_stopping} chooses a round by the clients' validation examples")
        found += self._uncovered("dp-metrics", "epsilon does")
        decided = decided_by_records(self.own_data(), self.data_info()) if is_own(self.dataset) else {}
        found += [
            f"{asked}: the records decide {what}, which epsilon does not cover: {way}" for what, way in decided.items()
        ]
        return found + (self._record_problems() if self.record_dp else [])

    def mask_settings(self) -> MaskSettings:
        """Return the settings of masked sums."""
        values: dict[str, Any] = {name: getattr(self, name) for name in MaskSettings.model_fields}
        return MaskSettings(**values)

    def _mask_problems(self) -> list[str]:
        """Return what of this run is no sum over the clients."""
        if self.strategy == CENTRALIZED:
            return ["masked-sums=true: strategy=centralized has no clients"]
        found = masked_sums.refusals(self._made()) + masked_sums.conflicts(self.dp_settings())
        if self.num_clients == 1:
            found.append(
                "masked-sums=true needs at least 2 clients, and num-clients=1: a sum over one client is its update"
            )
        return found + self._uncovered("masked-metrics", "masks do")

    def _made(self) -> FedAvg[Any]:
        return self.method()(**{**self.params().model_dump(), "eval_on": ",".join(self.evaluations())})

    def _uncovered(self, metrics: str, protects: str) -> list[str]:
        """Return what tells of the clients' data beside their updates; the setting ``metrics`` may publish some."""
        found = []
        if self.norm == "batch-renorm" and (self.dp != "off" or self.masked_sums):
            found.append("norm=batch-renorm warms up by counting batches, and with privacy a counter counts rounds")
        if self.standardise_as() == "federated" and not self.record_dp:
            found.append(
                f"standardise=federated collects sums of the clients' inputs, which {protects} not cover: use "
                "standardise=local or none"
            )
        if getattr(self, metrics.replace("-", "_")) == "withheld":
            tests = [name for name in self.evaluations() if name.startswith("personal")]
            of_clients: dict[str, Any] = {f"eval-on={','.join(tests)}": tests}
            of_clients |= {"validation-share": self.validation_share, "held-out-clients": self.held_out_clients}
            found += [
                f"{key} reports results on the clients' data, which {protects} not cover: leave it out, or set "
                f"{metrics}=published"
                for key, asked in of_clients.items()
                if asked
            ]
        return found

    def _record_problems(self) -> list[str]:
        """Return what does not fit DP-SGD in the clients."""
        found = []
        if self.masked_sums:
            found.append("record-dp=true with masked-sums=true: the two are not counted together; choose one of them")
        if not self.local_steps:
            found.append("record-dp=true counts steps: set local-steps, not local-epochs")
        target, limit, noise = self.record_dp_target_epsilon, self.dp_max_epsilon, self.record_dp_noise_multiplier
        if target and noise:
            found.append(
                f"record-dp-target-epsilon={target} chooses the noise; leave record-dp-noise-multiplier={noise} out"
            )
        if limit and not (target or noise):
            found.append(f"dp-max-epsilon={limit} needs record-dp-noise-multiplier or record-dp-target-epsilon")
        if limit and limit < target:
            found.append(f"dp-max-epsilon={limit} is below record-dp-target-epsilon={target}")
        if self.compile:
            found.append("record-dp=true computes the gradient of each example, and compile=true has no effect there")
        if self.standardise_as() != "none":
            found.append(
                f"record-dp=true: standardise={self.standardise_as()} brings the mean and std of the training examples "
                "into the model, without noise. Use standardise=none with features of a known range"
            )
        if self.series and carried_over(self._made()):
            found.append(
                f"record-dp=true with series={self.series}: what clients kept in earlier runs may have had no noise. "
                "Leave series out"
            )
        return found + (self._freezing_problems() if self.dp == "off" else self._both_problems())

    def _freeze_round(self) -> tuple[str, int | None]:
        """Return T* and the setting that says so; "" without FixBN, None if BN's statistics have no fixed T*."""
        kind = self.method()
        if not issubclass(kind, Freezing):
            return "", None
        key, at, parts = kind.freezes(self.params())
        if Part.STATISTICS not in parts:
            return "freeze-statistics=false", None
        return f"{key}={at}", freeze_round(at, self.num_server_rounds)

    def _freezing_problems(self) -> list[str]:
        """Return why BN is not frozen from round 1, though the method freezes it."""
        setting, after = self._freeze_round()
        if not setting or after == 0:
            return []
        return [
            f"record-dp=true: with {setting} BN normalises with whole batches before it is frozen, which no noise "
            "protects. Use strategy=fixbn with freeze-at=0, and init= for weights and statistics of public data; or "
            "protect these rounds by client-level noise (dp=server)"
        ]

    def _both_problems(self) -> list[str]:
        """Return why client-level noise before T* and DP-SGD after it do not make one guarantee."""
        both, (setting, after) = f"record-dp=true with dp={self.dp}", self._freeze_round()
        if not after:
            return [
                f"{both}: choose one of them. Both are for FixBN with T* above 0, where dp protects the rounds up to T*"
            ]
        found = []
        if after >= self.num_server_rounds:
            found.append(f"{both}: with {setting} BN is never frozen, so there is no DP-SGD")
        found += [f"{both}: {what}" for what in carried_over(self._made())]
        if self.dp_target_epsilon:
            found.append(
                f"{both}: dp-target-epsilon={self.dp_target_epsilon} is for clients, and epsilon is that of an example "
                "here"
            )
        if self.record_dp_target_epsilon:
            found.append(f"{both}: record-dp-target-epsilon={self.record_dp_target_epsilon} {TWO_NOISES}")
        if self.dp_neighbours != "zero-out" or self.dp_sampling != "known":
            found.append(
                f"{both}: dp-neighbours={self.dp_neighbours} and dp-sampling={self.dp_sampling} have no meaning for an "
                "example; leave them out"
            )
        return found

    def _one_task(self, data: Sequence[DatasetInfo]) -> None:
        """Check that the labels can be for the task, that it has the metrics, and that the model is for it."""
        per_pixel = model_info(self.model).per_pixel
        if self.task:
            self._known("task", self.task, TASKS)
        if not data:
            return
        own = self.data_info()
        self.example_shape()
        possible = (own.task.name, *own.tasks)
        if self.task and self.task not in possible:
            raise ConfigError(
                f"task={self.task}: the labels of dataset={self.dataset} are for {', '.join(possible)}. Leave task "
                "out, or use data of your own that have such labels."
            )
        task = self.learning_task()
        if per_pixel is not None and per_pixel != task.by_pixel:
            allowed = ", ".join(name for name, info in MODELS.items() if info.per_pixel in (task.by_pixel, None))
            gives = "outputs for each pixel" if per_pixel else "one vector of outputs for each example"
            raise ConfigError(
                f"dataset={self.dataset} is for {task.name}, model={self.model} gives {gives}. Use another data set, "
                f"or one of the models {allowed}"
            )
        if self.feature_norm and task.by_pixel:
            raise ConfigError(
                f"feature-norm=true is for a vector of features before a linear classifier, and the task {task.name} "
                "has a prediction for each pixel. Leave it out."
            )

    @staticmethod
    def _known(key: str, value: str, allowed: Any) -> None:
        if value not in allowed:
            raise unknown_name(key, value, allowed)

    def data_info(self) -> DatasetInfo:
        """Return the description of the run's data; own data are read first.

        Raises:
            ConfigError: the data set is unknown, or keys do not fit own data.
            DataError: own data cannot be used.
        """
        if not is_own(self.dataset):
            self._known("dataset", self.dataset, DATASETS)
        if found := adopted(self.data_key()):
            return found
        return own_info(self.own_data()) if is_own(self.dataset) else DATASETS[self.dataset]

    def data_key(self) -> DataKey:
        """Return what names the run's data between processes, see ``data.shared``."""
        return self.own_data() if is_own(self.dataset) else self.dataset, self.data_dir

    def example_shape(self) -> tuple[int, ...]:
        """Return the shape of the model's input: (C, H, W) of images, (features,) or another shape of other examples.

        Raises:
            ConfigError: the model is unknown.
        """
        info = self.data_info()
        if info.input_shape:
            return info.input_shape
        size, asked = self.image_size or info.size, bool(self.image_size)
        channels, height = input_shape(self.model, info.channels, size, asked=asked)
        return channels, height, info.aspect * height

    def num_outputs(self) -> int:
        """Return the number of the model's outputs."""
        found = self.data_info().num_classes
        return found if is_own(self.dataset) else self.learning_task().outputs(self.num_classes or found)

    def own_data(self) -> OwnData:
        """Return what the config says of own data."""
        kind, path = OwnData.parse(self.dataset)
        keys = [name for name in OwnData.__dataclass_fields__ if name not in ("kind", "path")]
        values: dict[str, Any] = {name: getattr(self, name) for name in keys}
        return OwnData(kind, path, **values)

    def _each(self) -> tuple[str, ...]:
        """Return the transforms of single images in ``augment``; () if it cannot be read, which is told elsewhere."""
        try:
            augment = Augment.parse(self.augment)
        except ConfigError:
            return ()
        return augment.each if augment else ()

    def data_on_nodes(self) -> bool:
        """Return whether only the nodes have the data: own data without a path."""
        return is_own(self.dataset) and self.dataset.endswith(":")

    def standardise_as(self) -> Standardise:
        """Return ``standardise``, or its default for the data."""
        return self.standardise or ("federated" if self.data_info().input_shape else "none")

    def split_name(self) -> str:
        """Return the name of the split: ``partition``, or its default for the data."""
        if self.partition or not is_own(self.dataset):
            return self.partition or "classes"
        return "natural" if self.data_info().grouped else "iid"

    def learning_task(self) -> Task:
        """Return the learning task: the loss, the metrics, and which targets count."""
        return self._plain_task().measuring(split(self.metrics))

    def _plain_task(self) -> Task:
        """Return the learning task with its own metrics."""
        own = self.data_info().task
        return own if self.task in ("", own.name) else TASKS[self.task]

    def hidden(self) -> tuple[int, ...]:
        """Return the widths of the hidden layers of ``mlp``; empty = its own."""
        widths = [_number(text) for text in split(self.mlp_hidden)]
        if not all(isinstance(width, int) and width > 0 for width in widths):
            raise ConfigError(f"mlp-hidden={self.mlp_hidden!r} must be a comma list of whole numbers above 0")
        return tuple(int(width or 0) for width in widths)

    def decays(self) -> tuple[tuple[int | str, ...], tuple[float, ...]]:
        """Return the rounds after which the learning rate decays (or "freeze") and the factor of each."""
        after: list[int | str] = []
        for text in split(self.lr_decay_at):
            value = _number(text)
            if text == "freeze":
                after.append(text)
            elif isinstance(value, int) and value >= 0:
                after.append(value)
            elif isinstance(value, float) and 0 <= value <= 1:
                after.append(share_of(text, self.num_server_rounds))
            else:
                raise ConfigError(f"lr-decay-at: {text!r} is not a round (int), a fraction in [0, 1] or 'freeze'")
        factors = [_number(text) for text in split(self.lr_decay_factor)]
        good = [float(f) for f in factors if f is not None and f > 0]
        if len(good) != len(factors) or len(good) not in (1, len(after)):
            raise ConfigError(
                f"lr-decay-factor={self.lr_decay_factor!r} must be one number above 0, or one for each of the "
                f"{len(after)} entries of lr-decay-at"
            )
        return tuple(after), tuple(good * len(after) if len(good) == 1 else good)

    def learning_rate_over_rounds(self) -> LearningRate:
        """Return the learning rate with its schedule, the same in every engine."""
        after, factors = self.decays()
        cosine = self.num_server_rounds if self.learning_rate_schedule == "cosine" else 0
        return LearningRate(self.learning_rate, after, factors, cosine, self.learning_rate_warm_up)

    def schedule_changes(self, begun_with: int) -> list[str]:
        """Return a warning for each setting of the learning rate that counts in R, if the run began with another R."""
        if begun_with in (0, self.num_server_rounds):
            return []
        shares = [text for text in split(self.lr_decay_at) if isinstance(_number(text), float)]
        found = ["learning-rate-schedule=cosine"] * (self.learning_rate_schedule == "cosine")
        return [
            f"the run began with {begun_with} rounds and now has {self.num_server_rounds}: {what} is of the new "
            "number, also where earlier rounds followed the old one"
            for what in found + [f"lr-decay-at={text}" for text in shares]
        ]

    def _added(self, role: str) -> list[str]:
        """Return the methods that the config key of a role adds to the strategy."""
        return split(getattr(self, role.replace("-", "_"))) if role else []

    def method(self) -> type[FedAvg[Any]]:
        """Return the class of the strategy, combined with the methods that are added to it.

        Raises:
            ConfigError: two of the methods cannot be combined.
        """
        return combined(*(STRATEGIES[name] for name in self._methods()))

    def _methods(self) -> list[str]:
        return [self.strategy, *(name for role in get_args(Role) for name in self._added(role))]

    def run_settings(self) -> RunSettings:
        """Return the settings of the run that the method checks its own against."""
        return RunSettings(
            self.num_server_rounds,
            self.norm,
            self.sgd_momentum,
            self.evaluations(),
            self.optimizer,
            self.gradient_clip_norm,
        )

    def without_effect(self) -> dict[str, tuple[Any, str]]:
        """Return the keys that differ from their default and that this run cannot use: value, and what they need."""
        unused = self._unused()
        if self.strategy == CENTRALIZED:
            unused |= dict.fromkeys(_OF_A_FEDERATION, "strategy=centralized has no clients")
            if not all(name.startswith("global") for name in self.evaluations()):
                unused["eval_on"] = "strategy=centralized has no clients: use global or global-batch-statistics"
            used: set[str] = set()
        else:
            unused |= self.method().unused(self.params(), self.run_settings())
            used = set(self.method().Params.model_fields)
        for name in _MethodSettings.model_fields:
            if name not in used and (users := [m.name for m in methods_with(STRATEGIES.values(), name)]):
                unused[name] = f"it is for {', '.join(users)}"
        fields = type(self).model_fields
        found = {name: (getattr(self, name), use) for name, use in unused.items()}
        return {fields[n].alias or n: (v, use) for n, (v, use) in found.items() if v != fields[n].default}

    @property
    def title(self) -> str:
        """The names of the methods, joined by "+"."""
        return self.strategy if self.strategy == CENTRALIZED else self.method().name

    @property
    def protected(self) -> bool:
        """Whether single clients or examples are to stay hidden: then their counts are in no page to give away."""
        return self.dp != "off" or self.record_dp or self.masked_sums

    def late_decays(self) -> list[str]:
        """Return a warning for each decay of the learning rate that the run is too short for."""
        rounds, (after, _) = self.num_server_rounds, self.decays()
        late = [one for one in after if isinstance(one, int) and one >= rounds]
        return [f"lr-decay-at={one}: the run has {rounds} rounds; only a resumed run may reach it" for one in late]

    def warnings(self) -> list[str]:
        """Return what these settings do that a user may not expect, one line each."""
        if self.strategy == CENTRALIZED:
            return self.late_decays()
        return [*self.late_decays(), *self.method().warnings(self.params(), self.run_settings())]

    def _freezes(self) -> bool:
        return self.strategy != CENTRALIZED and self.method().freezes_bn

    def _keeps_statistics(self) -> bool:
        return self.strategy != CENTRALIZED and Part.STATISTICS in self.method().local

    def _alone(self) -> bool:
        return self.strategy != CENTRALIZED and Part.REST in self.method().local

    def _unused(self) -> dict[str, str]:
        """Return the keys outside the method's settings that have no effect under the other keys."""
        info, task = self.data_info(), self._plain_task()
        shape, own, partition = self.example_shape(), is_own(self.dataset), self.split_name()
        size = shape[1] if not info.input_shape else 0
        tables = own and self.dataset.startswith(("csv:", "hf:"))
        mixes, adapts = self.test_bn == "mix", any(name.endswith(TEST_BN) for name in self.evaluations())
        tracks, steps = self.norm.startswith("batch"), self.learning_rate_schedule in ("", "step")
        hides = f"dp={self.dp}" if self.dp != "off" else "masked-sums=true" if self.masked_sums else ""
        conditions: dict[str, tuple[bool, str]] = {
            "variance": (tracks, "it is for norm=batch and batch-renorm"),
            "norm_groups": ("groups" in NORMS[self.norm].options, "it is for norm=group and group+ws"),
            "wsconv_gain": (self.norm == "wsconv", "it is for norm=wsconv"),
            "activation": (self.norm == "wsconv", "it is for norm=wsconv"),
            "renorm_rmax": (self.norm == "batch-renorm", "it is for norm=batch-renorm"),
            "renorm_dmax": (self.norm == "batch-renorm", "it is for norm=batch-renorm"),
            "feature_norm_scale": (self.feature_norm, "it is for feature-norm=true"),
            "bn_momentum": (tracks, "it is for norm=batch and batch-renorm"),
            "test_bn": (
                tracks and (adapts or bool(self.held_out_clients)),
                "it is for tests of eval-on that end in -test-bn, and for held-out-clients"
                if tracks
                else "it is for norm=batch and batch-renorm",
            ),
            "test_bn_prior": (
                mixes and self.test_bn_alpha == -1,
                "test-bn-alpha takes its place" if mixes else "it is for test-bn=mix",
            ),
            "test_bn_alpha": (mixes, "it is for test-bn=mix"),
            "test_bn_tau": (self.test_bn == "momentum", "it is for test-bn=momentum"),
            "test_bn_batch_size": (bool(self.test_bn), "it is for test-bn"),
            "frozen_bn": (bool(self.train_only) and tracks, "it is for train-only, with norm=batch and batch-renorm"),
            "mlp_hidden": (self.model == "mlp", "it is for model=mlp"),
            "image_size": (self.image_size in (0, size), f"model={self.model} takes images of {size} pixels"),
            "label_column": (tables, "it is for dataset=csv: and hf:"),
            "client_column": (tables, "it is for dataset=csv: and hf:"),
            "group_column": (tables, "it is for dataset=csv: and hf:; an npz file has an array `group`"),
            "split_column": (self.dataset.startswith("csv:"), "it is for dataset=csv:"),
            "feature_columns": (tables and bool(info.input_shape), "it is for rows of dataset=csv: and hf:"),
            "missing": (bool(info.input_shape), "it is for rows and signals"),
            "positive_values": (own and not self.dataset.startswith("folder:"), "it is for dataset=csv:, npz: and hf:"),
            "class_names": (
                own and task.name in ("classification", "binary") and not self.positive_values,
                "it is for own data with classes, without positive-values",
            ),
            "skip_unreadable": (self.dataset.startswith("folder:"), "it is for dataset=folder:"),
            "test_share": (own, "it is for own data"),
            "held_out_clients": (
                not self.data_on_nodes() and not self._alone(),
                f"{self.title} shares no model" if self._alone() else "only the nodes have the data",
            ),
            "cache_gib": (info.by_file, "it is for data sets of image files"),
            "data_workers": (info.by_file, "it is for data sets of image files"),
            "augment": (not info.input_shape, "it is for images"),
            "data_dir": (bool(info.files), f"dataset={self.dataset} needs no files"),
            "num_classes": (task.outputs(2) == 2, f"task {task.name} has one output"),
            "metrics": (not set(split(self.metrics)) <= set(task.metrics), f"task {task.name} always has it"),
            "partition_alpha": (partition.startswith("dirichlet"), "it is for partition=dirichlet[-equal]"),
            "classes_per_client": (partition == "classes", "it is for partition=classes"),
            "num_shards": ("shards" in partition, "it is for partition=shards and unbalanced-shards"),
            "shards_per_client": ("shards" in partition, "it is for partition=shards and unbalanced-shards"),
            "domain_share": (partition == "domain", "it is for partition=domain"),
            "fraction_evaluate": (
                any(name.startswith("personal") for name in self.evaluations()),
                "no test of eval-on is done by clients",
            ),
            "lr_decay_at": (
                steps and ("freeze" not in split(self.lr_decay_at) or self._freezes()),
                f"freeze is for fixbn and fedtan2, and {self.title} never freezes BN"
                if steps
                else "it is for learning-rate-schedule=step",
            ),
            "sampling": (
                bool(self.local_steps) and not self.record_dp,
                "record-dp draws each example with a fixed probability" if self.record_dp else "it is for local-steps",
            ),
            "watch_statistics": (
                tracks and not self._keeps_statistics() and not hides,
                f"{hides} leaves only an average of the clients' statistics"
                if hides
                else f"{self.title} keeps the statistics with its clients, and the server sees none"
                if tracks
                else "it is for norm=batch and batch-renorm",
            ),
            "dp_statistics_scale": (
                tracks and not self._keeps_statistics(),
                f"{self.title} shares no statistics" if tracks else "it is for norm=batch and batch-renorm",
            ),
            "sgd_momentum": (self.optimizer == "sgd", "it is for optimizer=sgd"),
            "lr_decay_factor": (bool(self.lr_decay_at), "lr-decay-at is empty"),
        }
        found = {name: use for name, (used, use) in conditions.items() if not used}
        for_dp, shared = differential.unused(self.dp_settings()), {"dp_delta", "dp_metrics", "dp_max_epsilon"}
        for_dp = {name: use for name, use in for_dp.items() if not (self.record_dp and name in shared)}
        of_records = set(RecordDPSettings.model_fields) - {"record_dp"} if not self.record_dp else ()
        found |= for_dp | dict.fromkeys(of_records, "it is for record-dp=true")
        return found | masked_sums.unused(self.mask_settings())

    def params(self) -> Params:
        """Return the settings of the run's method; "the method's own default" is replaced by that default."""
        kind: type[Params] = self.method().Params
        own = own_default(STRATEGIES.values())
        given = {name: getattr(self, name) for name in kind.model_fields}
        given["eval_on"] = ",".join(tests_in(self.eval_on))
        return kind(**{name: value for name, value in given.items() if name not in own or value != own[name]})

    def reestimates(self) -> bool:
        """Return whether BN statistics are re-estimated before tests."""
        if self.strategy == CENTRALIZED:
            return False
        return self.method().reestimates or self.recalibrate or "recalibrated" in self.evaluations()

    def evaluations(self) -> tuple[str, ...]:
        """Return the tests of ``eval-on`` or their default; the first one gives the run's main metric."""
        if asked := tests_in(self.eval_on):
            return asked
        return ("personal-own",) if self.strategy != CENTRALIZED and self.method().local else ("global",)

    @classmethod
    def make(cls, values: Mapping[str, Any], *, complete: bool = False) -> Config:
        """Return the config of a flat mapping of keys to scalars.

        Args:
            values: the settings; missing keys take their defaults.
            complete: whether ``values`` holds all keys, as Flower's run config does; a key with its default value then
                counts as not set, and what ``docker-compose.yml`` sets in every run is left out where it has no effect.

        Raises:
            ConfigError: all problems, one per line: unknown keys with the nearest known key, wrong types, values out of
                range, settings that contradict each other.
        """
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        lines: list[str] = []
        _warn_of_old_names(values)
        values = {RENAMED.get(key, key): value for key, value in values.items()}
        steps, epochs = (values.get(key) for key in ("local-steps", "local-epochs"))
        if steps and epochs and not (complete and epochs == fields["local-epochs"].default):
            lines.append(f"local-steps={steps} and local-epochs={epochs} are both set; set one of them")
        remaining = dict(values)
        while True:
            try:
                config = cls.model_validate(remaining)
                break
            except ValidationError as error:
                # Keys are checked together only if each one is valid: repeat without the bad ones.
                lines += [line for problem in error.errors() for line in _explain(problem, list(fields))]
                bad = {str(problem["loc"][0]) for problem in error.errors() if problem["loc"]}
                if not bad:
                    break
                remaining = {key: value for key, value in remaining.items() if str(key) not in bad}
        if not lines:
            unused = config.without_effect()
            preset = [key for key in _OF_THE_COMPOSE_FILE if complete and key in unused]
            names = {field.alias or name: name for name, field in cls.model_fields.items()}
            config = config.model_copy(update={names[key]: fields[key].default for key in preset})
            lines = [f"{k}={value!r} has no effect: {use}" for k, (value, use) in unused.items() if k not in preset]
        if lines:
            raise ConfigError("\n".join(lines))
        if config.strategy != CENTRALIZED:  # in place of "the method's own default"
            config = config.model_copy(update=config.params().model_dump())
        config = config.model_copy(update={"partition": config.split_name()})
        return config.model_copy(update={"local_epochs": 0}) if config.local_steps else config

    @classmethod
    def make_of_shared(cls, shared: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[Config, dict[str, str]]:
        """Return the config of settings that several runs share and of a run's own, which take precedence.

        Returns:
            The config, and the shared keys that were left out because they have no effect in this run, with the reason.

        Raises:
            ConfigError: as ``make``; also if a key of the run's own has no effect.
        """
        values = {RENAMED.get(key, key): value for key, value in {**shared, **own}.items()}
        dropped: dict[str, str] = {}
        while True:  # without one key another may have no effect
            try:
                found = cls.model_validate(values).without_effect()
            except ValidationError:
                found = {}  # ``make`` reports all problems
            more = {key: use for key, (_, use) in found.items() if key in shared and key not in own}
            if not more:
                return cls.make(values), dropped
            dropped |= more
            values = {key: value for key, value in values.items() if key not in more}

    @classmethod
    def load(cls, path: Path | None = None, overrides: Sequence[str] = ()) -> Config:
        """Return the config of a YAML file and ``key=value`` overrides (values are read as YAML).

        Raises:
            ConfigError: the file is missing, unreadable or no mapping, an override has no "=", or as ``make``.
        """
        values: dict[str, Any] = {}
        if path is not None:
            read = read_yaml(path, "config")
            if not isinstance(read, dict):
                raise ConfigError(f"config {path} must be a mapping of keys to values, not {type(read).__name__}")
            values.update(read)
        _warn_of_old_names(values)
        return cls.make({**from_older(values), **read_overrides(overrides)})

    def to_mapping(self) -> dict[str, Scalar]:
        """Return every key with its value, as Flower's run config holds it; ``make`` gives the same config back."""
        values: dict[str, Scalar] = self.model_dump(by_alias=True)
        return {key: values[key] for group in GROUPS for key in self.keys(group)}

    @classmethod
    def keys(cls, group: str) -> list[str]:
        """Return the keys of a group, in order."""
        extras = {field.alias or name: field.json_schema_extra for name, field in cls.model_fields.items()}
        return [key for key, extra in extras.items() if isinstance(extra, dict) and extra["group"] == group]


def _warn_of_old_names(values: Mapping[str, Any]) -> None:
    for old, new in RENAMED.items():
        if old in values:
            logger.warning("config key %r is now %r; the old name is read in this release only", old, new)


def from_older(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of an older version as those of this one: keys renamed, keys that had no effect left out.

    Older versions ignored such keys and wrote them to the resolved config. There ``agc`` acted under fedwon only.
    """
    found = {RENAMED.get(key, key): value for key, value in values.items()}
    if "local-part" in found or not found.keys() >= {"strategy", "agc", "server-momentum", "resume"}:
        return found
    if found["strategy"] != "fedwon":
        del found["agc"]
    _, dropped = Config.make_of_shared(found, {})
    return {key: value for key, value in found.items() if key not in dropped}


def read_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings of ``key=value`` texts; values are read as YAML.

    Raises:
        ConfigError: a text has no "=", or its value cannot be read.
    """
    values: dict[str, Any] = {}
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator:
            raise ConfigError(f"--set {override!r} must be key=value")
        try:
            # YAML would read ">0" as the head of a text over several lines, and "csv:" as a mapping.
            plain = not value.strip() or value.strip().startswith((">", "|")) or value.strip().endswith(":")
            values[key.strip()] = value.strip() if plain else yaml.safe_load(value)
        except UNREADABLE as error:
            raise ConfigError(f"--set {override!r}: {error}") from error
    return values


def state_in_out(config: Config) -> Path:
    """Return the state folder of ``state-dir=out``."""
    return Path(config.out) / "checkpoint" / "clients"


def split(text: str) -> list[str]:
    """Return the entries of a comma string, stripped, without empty ones."""
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def _number(text: str) -> int | float | None:
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            return None


def _try(problems: list[str], check: Any) -> None:
    try:
        check()
    except FedBNError as error:
        problems.append(str(error))


def _explain(problem: Any, keys: Sequence[str]) -> list[str]:
    """Return pydantic's problem as text with the config key, its value and what is allowed."""
    key = str(problem["loc"][0]) if problem["loc"] else ""
    if problem["type"] in ("extra_forbidden", "invalid_key"):
        near = difflib.get_close_matches(key, keys, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else " See docs/config.md for all keys."
        return [f"unknown key {key!r}.{hint}"]
    if problem["type"] == "value_error":
        text = str(problem["ctx"]["error"])
        return [f"{key}: {text}"] if key else text.split("\n")
    return [f"{key}={problem['input']!r}: {problem['msg'].lower()}"]
