"""Local training and evaluation of a torch model.

One function trains, one function evaluates. Both need only torch.
"""

from __future__ import annotations

from fedbn_flwr.training.batches import Batches
from fedbn_flwr.training.client_hook import ClientHook
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.loaded import batches_of
from fedbn_flwr.training.loop import TrainResult, train
from fedbn_flwr.training.optimizers import make_optimizer
from fedbn_flwr.training.own_task import OwnTask
from fedbn_flwr.training.settings import LearningRate, LocalTraining
from fedbn_flwr.training.tasks import (
    BINARY,
    CLASSIFICATION,
    MULTI_LABEL,
    REGRESSION,
    SEGMENTATION,
    Task,
)

__all__ = [
    "BINARY",
    "CLASSIFICATION",
    "MULTI_LABEL",
    "REGRESSION",
    "SEGMENTATION",
    "Batches",
    "ClientHook",
    "LearningRate",
    "LocalTraining",
    "OwnTask",
    "Task",
    "TrainResult",
    "batches_of",
    "evaluate",
    "make_optimizer",
    "train",
]
