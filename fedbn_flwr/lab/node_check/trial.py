"""One step of each part of a round on the node's own data: a federation of this node alone, in this process."""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable

from fedbn_flwr.client import client_app
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.lab.config import CENTRALIZED, Config, Scalar
from fedbn_flwr.lab.runs.node import client_fn
from fedbn_flwr.lab.runs.serve import serve
from fedbn_flwr.lab.runs.start_checks import check
from fedbn_flwr.messages.protocol import STATE_DIR

__all__ = ["Trial", "try_rounds"]

_ROUNDS = 2  # the second is the warm one
_MORE = 3  # steps of the second trial beside the first one: their time is that of steps alone
# What belongs to the server, to other clients or to later rounds.
_ALONE: dict[str, Scalar] = {
    "num-server-rounds": _ROUNDS,
    "num-clients": 0,
    "fraction-train": 1.0,
    "fraction-evaluate": 1.0,
    "min-replies": 1,
    "eval-every": 1,
    "eval-on": "personal-own",
    "held-out-clients": "",
    "early-stopping": 0,
    "checkpoint-every": 0,
    "init": "",
    "resume": False,
    "series": "",
    STATE_DIR: "",
    "out": "",
    "tensorboard": False,
    "dp": "off",
    "masked-sums": False,
    "round-timeout": 0.0,
}


@dataclass
class Trial:
    """What the trial measured.

    Attributes:
        seconds: for a whole round, by the kind of message: train, evaluate, query.statistics, ...
        steps: local steps of a whole round.
        step: seconds of one step.
        memory: the largest resident memory of this process, bytes.
        gpu_memory: the largest memory of torch's tensors on the GPU, bytes; 0 without one.
        kept: bytes of what the method left in the node's state folder.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    step: float = 0.0
    memory: int = 0
    gpu_memory: int = 0
    kept: int = 0

    @property
    def round(self) -> float:
        """Seconds of a whole round on this machine, without what travels."""
        return sum(self.seconds.values())


def try_rounds(config: Config, node: Mapping[str, Any], num_examples: int, state: Path | None) -> Trial:
    """Play two short rounds with this node alone, twice, and return what they took.

    The first has one local step, the second three more: the difference is the time of steps. The node's own methods
    run as in the run; masks and the server's noise, which need other clients, are left out.

    Args:
        config: the settings of the run.
        node: the node's config.
        num_examples: its training examples.
        state: the folder in which the node keeps its part; a folder in it is used, and removed. None = in memory.
    """
    trial = Trial(steps=_steps(config, num_examples))
    first = 1
    more = min(trial.steps, first + _MORE)
    with tempfile.TemporaryDirectory(prefix="check-node-", dir=state) as kept:
        given = {**node, STATE_DIR: kept} if state else {k: v for k, v in node.items() if k != STATE_DIR}
        short = _played(config, given, first)
        trial.kept = sum(path.stat().st_size for path in Path(kept).rglob("*") if path.is_file())
        trial.seconds = dict(short)
        if more > first:
            longer = _played(config, given, more)
            trial.step = max(0.0, longer["train"] - short["train"]) / (more - first)
            trial.seconds["train"] = short["train"] + (trial.steps - first) * trial.step
    of_kernel = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trial.memory = of_kernel * (1 if sys.platform == "darwin" else 1024)
    if torch.cuda.is_available():
        trial.gpu_memory = torch.cuda.max_memory_allocated()
    return trial


def _steps(config: Config, num_examples: int) -> int:
    """Return the local steps of a round."""
    if config.local_steps:
        return config.local_steps
    return config.local_epochs * -(-num_examples // (config.batch_size or num_examples))


def _alone(config: Config, steps: int) -> Config:
    """Return the settings of the short rounds: those of the run, where they do not need other clients."""
    changes = {**_ALONE, "local-steps": steps, "local-epochs": 0}
    own = config.method().Params.model_fields if config.strategy != CENTRALIZED else {}
    changes |= {key.replace("_", "-"): 1 for key in ("freeze_at", "fedtan_rounds") if key in own}  # each phase a round
    if config.record_dp:
        changes["dp-metrics"] = "published"  # they stay on this machine
    if config.by_function():
        info = config.data_info()
        shape = ",".join(map(str, info.input_shape))
        changes |= {"input-shape": shape, "task": info.task.name}
        changes |= {"num-classes": info.num_classes} if info.task.outputs(2) == 2 else {}
    defaults = {field.alias or name: field.default for name, field in Config.model_fields.items()}
    of_run = {key: value for key, value in config.to_mapping().items() if value != defaults[key]}
    return Config.make_of_shared({key: v for key, v in of_run.items() if key not in changes}, changes)[0]


def _played(config: Config, node: Mapping[str, Any], steps: int) -> dict[str, float]:
    """Return the seconds of the messages of the last round, by their kind.

    Raises:
        FedBNError: the round failed.
    """
    alone, spent, rounds = _alone(config, steps), defaultdict[str, float](float), list[dict[str, float]]()

    def timed(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        began = time.perf_counter()
        try:
            return call_next(message, context)
        finally:
            spent[message.metadata.message_type] += time.perf_counter() - began

    def on_round(_: object) -> None:
        rounds.append(dict(spent))
        spent.clear()

    app = client_app(client_fn, mods=[timed])
    with (
        tempfile.TemporaryDirectory(prefix="check-node-") as out,
        InProcessGrid(app, 1, run_config=alone.to_mapping(), node_configs=[node], seed=config.seed) as grid,
    ):
        serve(grid, check(alone), Path(out) / "run", on_round)
    return rounds[-1]
