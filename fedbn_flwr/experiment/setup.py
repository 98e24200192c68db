"""Device, model, local training and strategy of a config, the same on every node, and the checks before a run."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.batchnorm.parts import Part, Parts, learning_parts, split_state
from fedbn_flwr.data import Augment
from fedbn_flwr.errors import ConfigError, FedBNError, NormLayerError
from fedbn_flwr.experiment.config import CENTRALIZED, STATE_IN_OUT, Config, split
from fedbn_flwr.experiment.trackers import tracker_problems
from fedbn_flwr.messages.protocol import VALIDATION_LOSS
from fedbn_flwr.models import InitReport, build_model, load_initial
from fedbn_flwr.models.initial import FILES
from fedbn_flwr.privacy.record_level import WAY_OUT, mixes_examples
from fedbn_flwr.server.method import RECALIBRATED, Misfit
from fedbn_flwr.server.shared_bn import SHARED_BN
from fedbn_flwr.strategies import FedAvg, FedBS
from fedbn_flwr.strategies.fixbn import FreezeBN
from fedbn_flwr.training.freezing import train_only
from fedbn_flwr.training.memory_format import set_memory_format
from fedbn_flwr.training.randomness import seeded_on_cpu
from fedbn_flwr.training.settings import LocalTraining, share_of
from fedbn_flwr.training.tasks import CLASSIFICATION, SEGMENTATION

__all__ = [
    "build_options",
    "check",
    "in_memory_format",
    "initialise",
    "local_training",
    "make_model",
    "make_strategy",
    "misfits",
    "model_and_warnings",
    "moved_buffers",
    "on_device",
    "partly_without_effect",
    "pick_device",
    "refuse_too_few_clients",
    "training_model",
]


def pick_device(name: str) -> torch.device:
    """Return the torch device of a config's ``device``.

    Raises:
        ConfigError: the name is unknown, or there is no such CUDA device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    kind, _, index = name.partition(":")
    if kind != "cuda" or (index and not index.isdigit()):
        raise ConfigError(f"device={name!r} must be auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= count:
        raise ConfigError(f"device={name}: {count} CUDA device(s) found here. Use device=cpu, or device=auto.")
    return torch.device(name)


def refuse_named_gpu(config: Config) -> None:
    """Refuse ``device=cuda:N`` where Ray gives out the GPUs.

    Raises:
        ConfigError: the device is named.
    """
    if config.device.startswith("cuda:"):
        raise ConfigError(f"device={config.device} names a GPU, and Ray chooses it. Set device=cuda or auto.")


def gpu_share(at_once: int, gpus: int) -> float:
    """Return the part of a GPU that each of ``at_once`` runs or clients asks for: they share all GPUs evenly."""
    return 1 / max(1, -(-at_once // gpus))


def on_device(model: nn.Module, config: Config) -> nn.Module:
    """Return the model on the device of a config, in its memory format."""
    return in_memory_format(model.to(pick_device(config.device)), config)


def in_memory_format(model: nn.Module, config: Config) -> nn.Module:
    """Return the model in the memory format of a config."""
    return set_memory_format(model, config.memory_format, lambda: torch.zeros(2, *config.example_shape()))


def training_model(config: Config) -> nn.Module:
    """Return the model of a config, ready to train."""
    model = on_device(make_model(config), config)
    return cast(nn.Module, torch.compile(model)) if config.compile else model


def build_options(config: Config) -> dict[str, Any]:
    """Return the arguments of ``build_model`` of a config, as JSON can hold them."""
    return {
        "name": config.model,
        "num_classes": config.num_outputs(),
        "input_shape": list(config.example_shape()),
        "hidden": list(config.hidden()),
        "norm": config.norm,
        "norm_groups": config.norm_groups,
        "norm_options": {
            "rmax": config.renorm_rmax,
            "dmax": config.renorm_dmax,
            "activation": config.activation,
            "gain": config.wsconv_gain,
        },
        **({"feature_norm": config.feature_norm_scale} if config.feature_norm else {}),
        "seed": config.seed,
    }


def make_model(config: Config) -> nn.Module:
    """Return the model of a config on the CPU, with seeded weights and its ``train-only``."""
    return model_and_warnings(config)[0]


def model_and_warnings(config: Config) -> tuple[nn.Module, list[str]]:
    """Return the model as ``make_model``, and what a user may not expect of its BatchNorm, one line each."""
    model = build_model(**build_options(config))
    warnings = [] if config.strategy == CENTRALIZED else partly_without_effect(split_state(model), config.method())
    layers = {path: module for path, module in model.named_modules() if isinstance(module, _BatchNorm)}
    replaced = {
        path: layer.momentum for path, layer in layers.items() if layer.momentum not in (0.1, config.bn_momentum)
    }
    tracks = config.strategy == CENTRALIZED or "bn_momentum" not in config.method().unused(
        config.params(), config.run_settings()
    )
    if replaced and tracks:
        path, momentum = next(iter(replaced.items()))
        warnings.append(
            f"bn-momentum={config.bn_momentum:g} replaces the momentum of {len(replaced)} BatchNorm layers of model "
            f"{config.model!r} (of '{path}': {momentum}). Set bn-momentum to the value that the model should have."
        )
    for layer in layers.values():
        layer.momentum = config.bn_momentum
    train_only(model, split(config.train_only), config.frozen_bn)
    return model, warnings


def partly_without_effect(parts: Parts, method: type[FedAvg[Any]]) -> list[str]:
    """Return which BatchNorm layers lack entries that the method is about, one line each."""
    lines = []
    affine = frozenset(parts.affine)
    no_affine = [layer.path for layer in parts.layers if affine.isdisjoint(layer.entries.values())]
    if no_affine and Part.AFFINE in method.local:
        lines.append(f"{len(no_affine)} BN layer(s) have no gamma and beta to keep: {', '.join(no_affine[:3])}")
    no_statistics = [layer.path for layer in parts.layers if "running_mean" not in layer.entries]
    if no_statistics:
        lines.append(
            f"{len(no_statistics)} BN layer(s) track no running statistics and use the batch's own in testing: "
            + ", ".join(no_statistics[:3])
        )
    return lines


def initialise(model: nn.Module, config: Config) -> InitReport | None:
    """Load the initial weights of a config into the model, in place; return the report, None without ``init``.

    The server alone does so, and sends them: the nodes need no such file, and a resumed run has its checkpoint.

    Raises:
        ConfigError: the weights cannot be read, or none fits.
    """
    return load_initial(model, config.init, config.model, config.example_shape()[0]) if config.init else None


def local_training(config: Config) -> LocalTraining:
    """Return the settings of local training."""
    return LocalTraining(
        learning_rate=config.learning_rate_over_rounds(),
        local_steps=config.local_steps,
        sampling=config.sampling,
        local_epochs=config.local_epochs,
        batch_size=config.batch_size,
        optimizer=config.optimizer,
        sgd_momentum=config.sgd_momentum,
        weight_decay=config.weight_decay,
        gradient_clip_norm=config.gradient_clip_norm,
        amp=config.amp,
        memory_format=config.memory_format,
    )


def make_strategy(config: Config, model: nn.Module, num_nodes: int) -> FedAvg[Any]:
    """Return the strategy of a config for ``num_nodes`` nodes; the state is split by the model's layer types."""
    return config.method()(
        fraction_train=config.fraction_train,
        fraction_evaluate=config.fraction_evaluate,
        min_train_nodes=1,
        min_evaluate_nodes=1,
        # All nodes were there at the start (``serve`` counts them); a round does not wait for nodes lost since.
        min_available_nodes=min(num_nodes, config.min_replies),
        parts=split_state(model),
        **({"loss_key": VALIDATION_LOSS} if config.validation_share and config.strategy == FedBS.name else {}),
        **{**config.params().model_dump(), **_tests(config)},
    )


def refuse_too_few_clients(config: Config, num_clients: int) -> None:
    """Check that a round can have as many replies as it needs.

    Raises:
        ConfigError: it cannot, so that every round would keep the model of the one before.
    """
    asked = max(1, share_of(config.fraction_train, num_clients))
    if config.strategy != CENTRALIZED and config.min_replies > asked:
        raise ConfigError(
            f"min-replies={config.min_replies} is more than the {asked} clients of a round (fraction-train="
            f"{config.fraction_train:g} of {num_clients}): no round would change the model. Use at most {asked}."
        )


def _tests(config: Config) -> dict[str, str]:
    """Return the tests that the strategy must know: those of held-out clients need the average of local BN parts."""
    local = bool(config.method().local & {Part.AFFINE, Part.STATISTICS}) and Part.REST not in config.method().local
    if not config.held_out_clients or not local or SHARED_BN in config.evaluations():
        return {}
    return {"eval_on": ",".join((*config.evaluations(), SHARED_BN))}


def _replaces_nothing(config: Config) -> bool:
    """Return whether a norm finds no BatchNorm to replace; wsconv and fixup act without it, or refuse the model."""
    if config.norm not in ("group", "layer", "instance", "group+ws", "batch-renorm"):
        return False
    return not split_state(build_model(**{**build_options(config), "norm": "batch"})).layers


def check(config: Config) -> list[str]:
    """Check that a run can start here: the device, the folders, the layers that the method needs.

    Forward passes of the model on two examples, in eval mode and in train mode, find errors that would occur in every
    client.

    Returns:
        What looks wrong in the model's outputs, one line each.

    Raises:
        ConfigError: all problems, one per line; an augmentation that does not fit the images, or a memory format that
            has no effect on the model.
        NormLayerError: the model does not fit the strategy, or a norm does not fit the layers.
    """
    problems = []
    try:
        pick_device(config.device)
    except ConfigError as error:
        problems.append(str(error))
    problems += tracker_problems(config)
    if config.data_dir and not Path(config.data_dir).is_absolute():
        problems.append(
            f"data-dir={config.data_dir!r} is relative, and nodes run in other folders. Write the absolute path "
            f"(seen from the folder of this process: {str(Path(config.data_dir).absolute())!r})."
        )
    elif config.data_dir and not config.data_info().shared and not Path(config.data_dir).is_dir():
        problems.append(f"data-dir={config.data_dir!r} is not a folder. Create it, or name the one with the data.")
    if config.init.endswith(FILES) and not Path(config.init).is_absolute():
        problems.append(
            f"init={config.init!r} is relative, and the server may run in another folder. Write the absolute path "
            f"(seen from the folder of this process: {str(Path(config.init).absolute())!r})."
        )
    if config.state_dir == STATE_IN_OUT and not config.out:
        problems.append(f"state-dir={STATE_IN_OUT} is a folder in `out`, which is not set: set it to an absolute path")
    elif config.state_dir not in ("", STATE_IN_OUT) and not Path(config.state_dir).is_absolute():
        problems.append(
            f"state-dir={config.state_dir!r} is relative, and nodes run in other folders. Write it in full."
        )
    if problems:
        raise ConfigError("\n".join(problems))
    model = make_model(config)
    if not config.resume and _replaces_nothing(config):  # an older run may go on
        raise NormLayerError(
            f"norm={config.norm!r} changes nothing: model {config.model!r} has no BatchNorm. Use norm='batch'."
        )
    if found := misfits(config, model):
        ways = list(_other_settings(config))
        ways += [] if "norm='batch'" in ways else ["another model"]
        lines = [f"{need}; model {config.model!r} has {has or _norms(model)}." for need, has, _ in found]
        raise NormLayerError("\n".join(lines) + f" Use {' or '.join(ways)}.")
    if config.record_dp and (mixing := _mixing(config)):
        raise NormLayerError("\n".join(mixing) + f"\n{WAY_OUT}.")
    if config.test_bn and not any(isinstance(m, _BatchNorm) and m.running_mean is not None for m in model.modules()):
        raise NormLayerError(
            f"test-bn={config.test_bn} needs BatchNorm with running statistics; model {config.model!r} has "
            f"{_norms(model)}. Leave test-bn out, or use a model with BatchNorm."
        )
    if config.memory_format != "auto" and not any(p.dim() == 4 for p in model.parameters()):
        raise ConfigError(
            f"memory-format={config.memory_format} has no effect: model {config.model!r} has no 2-d convolutions. "
            "Leave it out."
        )
    if not config.resume:  # a resumed run needs no initial weights
        initialise(model, config)
    return _try_model(config, model)


def _mixing(config: Config) -> list[str]:
    """Return the layers that mix the examples of a batch in the clients' training."""
    model = make_model(config).train()
    if config.method().freezes_bn:
        FreezeBN(affine=False).begin(model)
    return mixes_examples(model)


def misfits(config: Config, model: nn.Module) -> list[Misfit]:
    """Return why the model does not fit the method of a config; BN layers that ``train-only`` leaves out do not count.

    A method for BatchNorm would have no effect on layers that do not change.
    """
    if config.strategy == CENTRALIZED:
        return []
    shapes = {name: tuple(entry.shape) for name, entry in model.state_dict().items()}
    method, params, parts = config.method(), config.params(), split_state(model)
    found = method.misfits(params, parts, shapes)
    if config.train_only and not found:
        which = "gamma and beta of" if config.frozen_bn == "train" else "all of"
        has = f"{parts.named_layers()}, and train-only={config.train_only} freezes {which} them"
        found = [fit._replace(has=has) for fit in method.misfits(params, learning_parts(model), shapes)]
    return found


def _other_settings(config: Config) -> Iterator[str]:
    """Yield each change of one setting with which the model fits."""
    tests = ",".join(name for name in config.evaluations() if name != RECALIBRATED)
    changes: dict[str, Any] = {
        "strategy": "fedavg",
        "local_part": "",
        "client_hooks": "",
        "recalibrate": False,
        "eval_on": tests,
    }
    if config.train_only:
        changes |= {"frozen_bn": "train", "train_only": ""}
    for name, value in {**changes, "norm": "batch"}.items():
        if value == getattr(config, name):
            continue
        other = config.model_copy(update={name: value})
        with suppress(ConfigError):  # the methods that are left cannot be combined
            if not misfits(other, make_model(other)):
                yield f"{name.replace('_', '-')}={value!r}"


def _try_model(config: Config, model: nn.Module) -> list[str]:
    """Try the model, which is no longer of use: its statistics move. Return what looks wrong in its outputs."""
    examples = torch.zeros(2, *config.example_shape(), dtype=torch.uint8)
    if augment := Augment.parse(config.augment):
        examples = augment(examples, torch.Generator())
    _outputs(config, model.eval(), examples.float())
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"model {config.model!r} has no parameter to train: all have requires_grad=False, or there are none. Leave "
            "some of them trainable."
        )
    noise = torch.rand(examples.shape, generator=torch.Generator().manual_seed(0))
    outputs = _outputs(config, model.train(), noise)
    if config.learning_task().name not in (CLASSIFICATION.name, SEGMENTATION.name):
        return []
    if (outputs < 0).any() or not torch.allclose(outputs.float().sum(1), torch.ones(())):
        return []
    return [
        f"model {config.model!r} seems to end with a softmax: its outputs are not negative and have the sum 1. The "
        "loss takes outputs without softmax: leave it out."
    ]


def moved_buffers(model: nn.Module, config: Config) -> frozenset[str]:
    """Return the buffers that a step of training changes: running statistics, or an average of a user's own."""
    own = copy.deepcopy(model).to("cpu").train()
    before = {name: buffer.clone() for name, buffer in own.named_buffers(remove_duplicate=False)}
    _outputs(config, own, torch.rand(2, *config.example_shape(), generator=torch.Generator().manual_seed(0)))
    now = own.named_buffers(remove_duplicate=False)
    return frozenset(name for name, buffer in now if not torch.equal(buffer, before[name]))


def _outputs(config: Config, model: nn.Module, examples: torch.Tensor) -> torch.Tensor:
    """Return the model's outputs for a batch.

    Raises:
        ConfigError: the model fails, or its outputs do not fit the task.
    """
    what = f"{'in train mode ' if model.training else ''}for a batch of inputs {tuple(examples.shape)}"
    try:
        with torch.no_grad(), seeded_on_cpu(0):
            outputs = model(examples)
    except FedBNError:
        raise
    except Exception as error:  # the model's own, which may raise anything
        raise ConfigError(f"model {config.model!r} fails {what}: {type(error).__name__}: {error}") from error
    pixels = examples.shape[2:] if config.learning_task().by_pixel else ()
    wanted = (2, config.num_outputs(), *pixels)
    fits = isinstance(outputs, torch.Tensor) and tuple(outputs.shape) in (wanted, (2,) if wanted == (2, 1) else wanted)
    if not fits:
        got = f"shape {tuple(outputs.shape)}" if isinstance(outputs, torch.Tensor) else f"a {type(outputs).__name__}"
        raise ConfigError(
            f"model {config.model!r} returns {got} {what}; {config.learning_task().name} needs a tensor of shape "
            f"{wanted} (outputs without softmax)."
        )
    return cast(torch.Tensor, outputs)


def _norms(model: nn.Module) -> str:
    """Return the kinds and the first paths of the model's norm layers, for messages."""
    norms = [(path, kind) for path, module in model.named_modules() if (kind := _norm_kind(module))]
    kinds = " and ".join(sorted({kind for _, kind in norms}))
    return f"only {kinds} ({', '.join(path for path, _ in norms[:2])}, ...)" if norms else "no normalisation"


def _norm_kind(module: nn.Module) -> str:
    """Return the name of the module's normalisation class in torch; "" for other layers."""
    names = [kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.nn")]
    return names[0] if names and "Norm" in names[0] else ""
