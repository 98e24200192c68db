"""Refuse own data that have changed since a run."""

from __future__ import annotations

from pathlib import Path

from fedbn_flwr.errors import DataError, NotResumableError
from fedbn_flwr.lab.config import Config, data_of
from fedbn_flwr.lab.data import is_own, own_data
from fedbn_flwr.lab.results.files import read_json


def sha256_of_data(config: Config) -> str | None:
    """Return the SHA-256 of own data, or None if the files are not here."""
    try:
        return own_data(data_of(config).own).sha256
    # The data may be absent, because a user may look at a run's folder on another
    # machine.
    except DataError:
        return None


def has_other_data(run: Path, config: Config) -> bool:
    """Return whether own data, or their division into parts, have changed since a run.

    The result is False if the run's folder has no digest of the data, or if the data
    are not here.
    """
    if not is_own(config.dataset) or data_of(config).on_nodes:
        return False
    before = read_json(run / "data.json").get("sha256")
    if not before:
        return False
    now = sha256_of_data(config)
    return now is not None and now != before


def refuse_other_data(run: Path, config: Config) -> None:
    """Raise NotResumableError if a run would continue with other data."""
    # Refuse changed data, because the run may have trained on examples that are now
    # test examples.
    if has_other_data(run, config):
        raise NotResumableError(
            f"dataset={config.dataset!r} has changed since the run in {run} began:"
            " other examples, another order or another division into training and test"
            " examples. Restore the data, or start a new run in another folder."
        )
