"""The typed config of a run: the same keys in YAML, ``--set``, ``--run-config`` and ``[tool.flwr.app.config]``.

The settings of the methods come from the strategies' ``Params``: the key ``freeze-at``, for example, is
``FixBNParams.freeze_at`` in ``strategies/fixbn.py``. ``docs/config.md`` names the methods of each key.

``fields.py`` has all other keys, ``values.py`` what follows from them, ``checks.py`` and ``privacy_checks.py`` what is
refused, ``unused.py`` which key has no effect, and ``config.py`` reads and writes them.
"""

from __future__ import annotations

from fedbn_flwr.lab.config.config import RENAMED, Config, Scalar, state_in_out
from fedbn_flwr.lab.config.fields import CENTRALIZED, GROUPS, STATE_IN_OUT
from fedbn_flwr.lab.config.texts import number, read_overrides, split
from fedbn_flwr.lab.config.unused import without_effect

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
