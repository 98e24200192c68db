"""How a protection declares a setting: as a method does, in the group "privacy" of the config keys."""

from __future__ import annotations

import functools

from fedbn_flwr.server.params import Settings
from fedbn_flwr.server.params import setting as _setting

__all__ = ["Settings", "setting"]

setting = functools.partial(_setting, group="privacy")
