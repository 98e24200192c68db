"""The checks of this machine and of the model before a run.

``checked_config`` returns a ``CheckedConfig``: the config, and the model that was built for the
checks. A function that takes a ``CheckedConfig`` neither checks the config nor builds
the model again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.errors import ConfigError, FedBNError, NormLayerError
from fedbn_flwr.lab.config import STATE_IN_OUT, Config, data_of, method_of
from fedbn_flwr.lab.config.check_config import of_reading
from fedbn_flwr.lab.models import build_model
from fedbn_flwr.lab.objects_of_config import (
    build_options,
    initialise,
    local_training,
    make_model,
    model_and_warnings,
    pick_device,
)
from fedbn_flwr.lab.partitioned.partitioned_data import load_data
from fedbn_flwr.machine import has_bfloat16
from fedbn_flwr.privacy.counters import refuse_cumulative
from fedbn_flwr.problems import Problem, raise_or_warn
from fedbn_flwr.training.batches import map_inputs
from fedbn_flwr.training.borrowed import borrowed, lending
from fedbn_flwr.training.freezing import layers_of
from fedbn_flwr.training.loop import ONE_BY_ONE
from fedbn_flwr.training.own_task import OwnTask
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.single_examples import takes_one_example


@dataclass(frozen=True)
class CheckedConfig:
    """A config that can run on this machine.

    Attributes:
        config: the settings.
        model: the initial model, on the CPU; the run takes it over.
        warnings: warnings about this run, one line each; the run logs them when it
            begins.
    """

    config: Config
    model: nn.Module
    warnings: tuple[str, ...]


def checked_config(config: Config) -> CheckedConfig:
    """Check that a run can start here: device, folders, and the layers of the model.

    The model does forward passes on two examples, in eval mode and in train mode. They
    find errors that would occur in every client.

    Raises:
        ConfigError: all problems, one per line; an augmentation that does not fit the
            images.
        NormLayerError: the model does not fit the strategy, or a norm does not fit the
            layers.
    """
    # Check this machine.
    raise_or_warn(_problems_here(config), "")
    warnings = []
    device = pick_device(config.device)
    if config.amp and not has_bfloat16(device):
        warnings.append(
            f"amp=true: this machine's {device.type} has no instructions for bfloat16,"
            " and emulates it several times slower than float32. Leave amp out, unless"
            " the clients run on other machines."
        )

    # Build the model, and try a second one, because a forward pass changes its
    # statistics.
    model, of_model = model_and_warnings(config)
    _refuse_norms(config, model)
    trial = make_model(config)
    # A resumed run does not read the initial weights, because their file may be gone.
    if not config.resume:
        initialise(trial, config)
    _try_model(config, trial)
    warnings += config.late_decays()
    warnings += of_model
    return CheckedConfig(config, model, tuple(warnings))


def _problems_here(config: Config) -> Iterator[Problem]:
    """Yield each reason why the run cannot start on this machine."""
    # Check the device, and the packages of extras.
    yield from of_reading("device", lambda: pick_device(config.device))
    if config.loop:
        yield from of_reading("loop", lambda: local_training(config))
    # Paths must be absolute, because Flower starts nodes and servers in folders of its
    # own.
    paths = {"data-dir": config.data_dir, "init": config.init}
    if config.state_dir != STATE_IN_OUT:
        paths["state-dir"] = config.state_dir
    for key, path in paths.items():
        if path and not Path(path).is_absolute():
            yield Problem(
                "relative-path",
                f"{key}={path!r} is relative, and the server and the nodes run in other"
                " folders. Write the absolute path (seen from the folder of this"
                f" process: {str(Path(path).absolute())!r}).",
                key,
                "start",
            )
        elif key == "data-dir" and not Path(path).is_dir():
            yield Problem(
                "data-dir-missing",
                f"data-dir={path!r} is not a folder. Create it, or set data-dir to the"
                " folder with the data.",
                key,
                "start",
            )
    if config.state_dir == STATE_IN_OUT and not config.out:
        yield Problem(
            "state-dir-without-out",
            f"state-dir={STATE_IN_OUT} is a folder in `out`, but `out` is not set. Set"
            " state-dir to an absolute path",
            "state-dir out",
            "start",
        )


def _refuse_norms(config: Config, model: nn.Module) -> None:
    """Raise NormLayerError if the norm layers of the model do not fit the settings."""
    # Accept a resumed run, because it may have begun with a version that did not check
    # this.
    if not config.resume and _replaces_nothing(config):
        raise NormLayerError(
            f"norm={config.norm!r} changes nothing: model {config.model!r} has no"
            " BatchNorm. Use norm='batch'.",
            code="norm-replaces-nothing",
        )
    hint = "" if config.norm == "batch" else "Or set norm=batch to keep this model."
    raise_or_warn(misfits(config, model), "-", hint)

    # With a protection, the counters of BN count rounds. A cumulative average needs a
    # count of batches, so refuse it.
    if config.protected:
        refuse_cumulative(model, f"dp={config.dp}")

    layers = layers_of(model).values()
    tracked = [layer for layer in layers if layer.running_mean is not None]
    if config.test_bn and not tracked:
        raise NormLayerError(
            f"test-bn={config.test_bn} needs BatchNorm with running statistics; model"
            f" {config.model!r} has {_norms(model)}. Leave test-bn out, or use a model"
            " with BatchNorm.",
            code="test-bn-without-batchnorm",
        )


def _replaces_nothing(config: Config) -> bool:
    """Return whether ``norm`` has no effect, because it finds no BatchNorm."""
    # The norms wsconv and fixup are not in this list, because they also act on models
    # without BatchNorm, or refuse the model themselves.
    if config.norm not in ("group", "layer", "instance", "group+ws"):
        return False
    options = {**build_options(config), "norm": "batch"}
    return not split_state(build_model(**options)).layers


def misfits(config: Config, model: nn.Module) -> list[Problem]:
    """Return the problems of a model that does not fit the method of a config."""
    # Check the layers of the model.
    method = method_of(config)
    parts, learning = method.parts(model), method.parts(model, learning=True)
    known = replace(
        method.known,
        parts=parts,
        shapes={name: tuple(one.shape) for name, one in model.state_dict().items()},
        model=f"model {config.model!r}",
        has=_norms(model),
    )
    found = method.methods.problems(known, ["model"])
    if found or learning == parts:
        return found

    # Then check the layers that train, because a method has no effect on BN that does
    # not change.
    by = "freezes them itself"
    if config.train_only:
        by = f"train-only={config.train_only} freezes all of them"
    known = replace(
        known,
        parts=learning,
        untrained=f"{parts.named_layers()}, and {by}",
    )
    return method.methods.problems(known, ["model"])


def _try_model(config: Config, model: nn.Module) -> None:
    """Try forward passes.

    The passes change the running statistics of the model.

    Raises:
        ConfigError: the model fails, its outputs do not fit the task, it has no
            parameter to train, or BatchNorm cannot train on batches of one example.
    """
    # Apply the augmentation, because it may not fit the images.
    examples = torch.zeros(2, *data_of(config).shape, dtype=torch.uint8)
    augment = data_of(config).augmentation
    if augment:
        examples = augment(examples, torch.Generator())
    # Use inputs whose values differ. Draw them before any forward pass, because a pass
    # may create entries of the model.
    noise = torch.rand(examples.shape, generator=torch.Generator().manual_seed(0))

    task = data_of(config).task
    is_own = isinstance(task, OwnTask)
    if not is_own:
        _outputs(config, model.eval(), examples.float())
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"model {config.model!r} has no parameter to train: all have"
            " requires_grad=False, or there are none. Leave some of them trainable."
        )
    for name, entry in model.state_dict().items():
        if entry.dtype == torch.complex128:
            raise ConfigError(
                f"model {config.model!r}: entry '{name}' is complex128, which the files"
                " of a run (safetensors) cannot store. Use complex64."
            )
    if is_own:
        _try_loss(config, model)
        return
    _outputs(config, model.train(), noise)
    lend = lending(model, task)
    if config.batch_size == 1 and not takes_one_example(model, noise[:1], None, lend):
        # In a synchronised step, and with frozen statistics, one example is enough.
        whole = method_of(config).methods.all_phases
        if not (whole.exchanges or whole.frozen):
            raise ConfigError(ONE_BY_ONE)


def _try_loss(config: Config, model: nn.Module) -> bool:
    """Try the loss of a user's task in train mode, on the first two examples.

    The result is whether this process has examples.

    Raises:
        ConfigError, DataError: the loss or the data cannot be used.
    """
    if not data_of(config).own.sites:
        return False
    examples = load_data(config).train
    batch = examples.take(torch.arange(min(2, len(examples))))
    with seeded(0, cpu_only=True):
        task = copy.deepcopy(data_of(config).task)
        task.step(model.train(), *map_inputs(lambda part: part.to("cpu"), batch))
    return True


def moved_buffers(model: nn.Module, config: Config) -> frozenset[str]:
    """Return the names of the buffers that a forward pass in train mode changes.

    Examples are running statistics, and an average in a user's own layer.
    """
    inputs = torch.rand(
        2, *data_of(config).shape, generator=torch.Generator().manual_seed(0)
    )
    with borrowed(model) as trial:
        trial.to("cpu").train()
        buffers = dict(trial.named_buffers(remove_duplicate=False))
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        if not isinstance(data_of(config).task, OwnTask):
            _outputs(config, trial, inputs)
        elif not _try_loss(config, trial):
            return frozenset(buffers)
        # List the buffers again, because a layer may have replaced a buffer by another
        # tensor.
        now = dict(trial.named_buffers(remove_duplicate=False))
        return frozenset(
            name for name, one in now.items() if not torch.equal(one, before[name])
        )


def _outputs(config: Config, model: nn.Module, examples: torch.Tensor) -> torch.Tensor:
    """Return the model's outputs for a batch.

    Raises:
        ConfigError: the model fails, or its outputs do not fit the task.
    """
    task = data_of(config).task
    what = f"for a batch of inputs {tuple(examples.shape)}"
    if model.training:
        what = f"in train mode {what}"
    # Seed a separate random state, so that layers such as dropout do not change the
    # process's generators.
    try:
        with torch.no_grad(), seeded(0, cpu_only=True):
            outputs = model(examples)
    except FedBNError:
        raise
    except Exception as error:  # the user's model may raise anything
        raise ConfigError(
            f"model {config.model!r} fails {what}: {type(error).__name__}: {error}"
        ) from error

    # The model needs one output for each class, and for each pixel if pixels have
    # classes. If there is only one output, its axis may be missing.
    pixels = examples.shape[2:] if task.by_pixel else ()
    wanted = (2, data_of(config).num_outputs, *pixels)
    got = f"a {type(outputs).__name__}"
    if isinstance(outputs, torch.Tensor):
        shape = tuple(outputs.shape)
        if shape == wanted or (shape, wanted) == ((2,), (2, 1)):
            return outputs
        got = f"shape {shape}"
    raise ConfigError(
        f"model {config.model!r} returns {got} {what}; {task.name} needs a"
        f" tensor of shape {wanted} (outputs without softmax)."
    )


def _norms(model: nn.Module) -> str:
    """Return the kinds and the first paths of the model's norm layers, for messages."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        # Name a user's subclass by the first class of torch among its bases.
        in_torch = [
            kind.__name__
            for kind in type(module).__mro__
            if kind.__module__.startswith("torch.nn")
        ]
        if in_torch and "Norm" in in_torch[0]:
            found[path] = in_torch[0]
    if not found:
        return "no normalisation"
    kinds = " and ".join(sorted(set(found.values())))
    paths = ", ".join([*found][:2])
    return f"only {kinds} ({paths}, ...)"
