"""The command line.

``fedbn-flwr run | sweep | report | doctor | list | partition | evaluate | calibrate``
"""

from __future__ import annotations

# isort: off
# Each import adds commands to the app, and --help shows them in the order of these
# imports.
from fedbn_flwr.lab.cli import (  # noqa: F401
    before,
    run_command,
    sweep_command,
    report_command,
    finished,
)
from fedbn_flwr.lab.cli.console import app

# isort: on

__all__ = ["app"]
