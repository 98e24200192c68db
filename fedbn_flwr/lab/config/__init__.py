"""The typed config of a run, with one set of keys for all sources.

The sources are YAML, ``--set``, ``--run-config`` and ``[tool.flwr.app.config]``.

``fields.py`` has the keys; keys of the methods come from the ``Params`` in the files of
``strategies/``. ``config.py`` reads and writes configs, with ``values.py`` and
``yaml_text.py``. ``check_config.py`` has the refusals of a config, in three stages: each
key alone, the keys together, and the data with the methods.

``data.py`` and ``method_of_config.py`` resolve the settings: ``data_of(config)``,
``method_of(config)``. A name of this package imports its module when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedbn_flwr.lazy import imported_when_used

if TYPE_CHECKING:
    from fedbn_flwr.lab.config.config import Config, Scalar, state_in_out
    from fedbn_flwr.lab.config.data import data_of
    from fedbn_flwr.lab.config.fields import GROUPS, STATE_IN_OUT
    from fedbn_flwr.lab.config.method_of_config import (
        learning_rate_of,
        method_of,
        schedule_changes,
    )
    from fedbn_flwr.lab.config.values import (
        CENTRALIZED,
        listed,
        number,
        split,
    )
    from fedbn_flwr.lab.config.yaml_text import read_overrides
else:
    _WHERE = {
        "CENTRALIZED": "values",
        "GROUPS": "fields",
        "STATE_IN_OUT": "fields",
        "Config": "config",
        "Scalar": "config",
        "data_of": "data",
        "learning_rate_of": "method_of_config",
        "listed": "values",
        "method_of": "method_of_config",
        "number": "values",
        "read_overrides": "yaml_text",
        "schedule_changes": "method_of_config",
        "split": "values",
        "state_in_out": "config",
    }
    __getattr__, __dir__ = imported_when_used(__name__, _WHERE)

__all__ = [
    "CENTRALIZED",
    "GROUPS",
    "STATE_IN_OUT",
    "Config",
    "Scalar",
    "data_of",
    "learning_rate_of",
    "listed",
    "method_of",
    "number",
    "read_overrides",
    "schedule_changes",
    "split",
    "state_in_out",
]
