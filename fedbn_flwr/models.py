"""Models: the registry, the input of each model, the seeded build, and initial weights. Torch and torchvision."""

from __future__ import annotations

from fedbn_flwr.lab.models import *  # noqa: F403
from fedbn_flwr.lab.models import __all__ as __all__
