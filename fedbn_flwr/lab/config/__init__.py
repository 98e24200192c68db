"""The typed config of a run: the same keys in YAML, ``--set``, ``--run-config`` and ``[tool.flwr.app.config]``.

The settings of the methods come from the strategies' ``Params``: the key ``freeze-at``, for example, is
``FixBNParams.freeze_at`` in ``strategies/fixbn.py``. ``docs/config.md`` names the methods of each key.

``fields.py`` has all other keys, ``values.py`` what follows from them, ``checks.py`` and ``privacy_checks.py`` what is
refused, ``unused.py`` which key has no effect, and ``config.py`` reads and writes them. ``at_once.py`` tells a bad
config before torch is imported, by ``table.json``; so a name here costs its module when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedbn_flwr.lazy import imported_when_used

if TYPE_CHECKING:
    from fedbn_flwr.lab.config.config import Config, Scalar, state_in_out
    from fedbn_flwr.lab.config.fields import GROUPS, STATE_IN_OUT
    from fedbn_flwr.lab.config.reading import RENAMED
    from fedbn_flwr.lab.config.table import CENTRALIZED
    from fedbn_flwr.lab.config.texts import number, split
    from fedbn_flwr.lab.config.unused import without_effect
    from fedbn_flwr.lab.config.yaml_text import read_overrides
else:
    _WHERE = {
        "CENTRALIZED": "table",
        "GROUPS": "fields",
        "RENAMED": "reading",
        "STATE_IN_OUT": "fields",
        "Config": "config",
        "Scalar": "config",
        "number": "texts",
        "read_overrides": "yaml_text",
        "split": "texts",
        "state_in_out": "config",
        "without_effect": "unused",
    }
    __getattr__, __dir__ = imported_when_used(__name__, _WHERE)

__all__ = [
    "CENTRALIZED",
    "GROUPS",
    "RENAMED",
    "STATE_IN_OUT",
    "Config",
    "Scalar",
    "number",
    "read_overrides",
    "split",
    "state_in_out",
    "without_effect",
]
