"""What a reply tells of a client's classes, under each protection: the attack of ``fedbn_flwr.privacy.leakage``.

    python benchmarks/leakage.py                                              # digits, five minutes on one core
    python benchmarks/leakage.py --data-dir DIR --write docs/results/privacy.md     # and MNIST

Twenty clients under Dirichlet(0.3) label skew train for some rounds; then the attacker gets what they send in the next
round. It has the test set as public data, and 200 shadow clients.
"""

from __future__ import annotations

import functools
import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from fedbn_flwr.batchnorm.averaging import State
from fedbn_flwr.batchnorm.parts import Part, split_state
from fedbn_flwr.data import Subset
from fedbn_flwr.experiment.config import Config
from fedbn_flwr.experiment.partitioned_data import PartitionedData, partitioned_data
from fedbn_flwr.experiment.run import preflight, run
from fedbn_flwr.experiment.setup import local_training, make_model
from fedbn_flwr.messages.records import tensors, to_state
from fedbn_flwr.privacy.coordinates import Coordinates
from fedbn_flwr.privacy.leakage import ClassMixAttack, class_mix, shadow_clients
from fedbn_flwr.privacy.noise import SystemNoise
from fedbn_flwr.seeds import numpy_generator, torch_generator
from fedbn_flwr.training import train
from fedbn_flwr.training.wrappers import load_state
from measure import facts, table, write_block

CLIENTS, SHADOWS, ALPHA = 20, 200, 0.3
DATA: dict[str, dict[str, Any]] = {
    "digits": {"dataset": "digits", "num-server-rounds": 5, "local-epochs": 2},
    "MNIST": {"dataset": "mnist", "num-server-rounds": 5, "local-steps": 60},
}
Updates = Sequence[Mapping[str, Any]]
