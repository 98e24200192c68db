"""Commands of ``fedbn-flwr`` in this process."""

from __future__ import annotations

from click.testing import Result
from typer.testing import CliRunner

from fedbn_flwr.lab.cli import app


def call(*words: object) -> Result:
    """Run a command."""
    return CliRunner().invoke(app, [*map(str, words)])


def output_of(*words: object) -> str:
    """Run a command that must succeed, and return its output."""
    done = call(*words)
    assert done.exit_code == 0, done.output
    return done.output
