"""The model of a finished run, and a client's own model: the shared entries joined with what the client kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.errors import StateError

__all__ = ["ABSENT", "client_file", "global_state", "personal_state", "why_absent"]

ABSENT = "absent: it stays with the clients"
"""The metadata of ``model.safetensors`` for a part of the state whose entries are left out."""


def client_file(run: Path, client: int | str) -> Path:
    """Return the file with the entries that a client kept."""
    return run / "clients" / f"client-{client}.safetensors"


def why_absent(absent: Sequence[str], clients: Sequence[str]) -> str:
    """Return why ``model.safetensors`` lacks these parts, and what to do.

    Args:
        absent: the parts.
        clients: the clients with a file in the run's folder.
    """
    text = (
        f"model.safetensors has no {', '.join(absent)} entries: they stay with the clients, and the server has only "
        f"their initial values. fedbn_flwr.personal_state(run, client) gives a client's own model ({_here(clients)})."
    )
    if Part.REST in absent:
        return f"{text} Nothing is shared, so there is no global model."
    return f"{text} A run with eval-on=averaged-bn saves the average of the clients' entries."


def global_state(run: str | Path) -> dict[str, torch.Tensor]:
    """Return the state of a finished run's global model, for ``model.load_state_dict``.

    Args:
        run: the output folder.

    Raises:
        StateError: the folder has no model, or entries are left out, because they stay with the clients.
    """
    state, absent = _shared(Path(run))
    if absent:
        raise StateError(f"{run}: {why_absent(absent, _clients(Path(run)))}")
    return state


def personal_state(run: str | Path, client: int) -> dict[str, torch.Tensor]:
    """Return the state of a client's own model after a run: the shared entries, and those that this client kept.

    It is the model that ``personal-own`` tested in the last round. A client without entries of its own has the global
    model, if that is whole: where nothing stays with the clients, or with ``eval-on=averaged-bn``.

    Args:
        run: the output folder of a run whose clients shared its disk (``state-dir=out``).
        client: the partition id.

    Raises:
        StateError: the folder has no model, or none of this client.
    """
    folder = Path(run)
    state, absent = _shared(folder)
    if (file := client_file(folder, client)).is_file():
        return {**state, **_read(file)[0]}
    if absent:
        raise StateError(
            f"{run}: client={client} has no entries of its own ({_here(_clients(folder))}). It did not train in this "
            f"run, or its {', '.join(absent)} entries are on another disk."
        )
    return state


def _shared(run: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the entries of ``model.safetensors``, and the parts that it lacks."""
    state, about = _read(run / "model.safetensors")
    return state, [part for part in Part if about.get(part) == ABSENT]


def _clients(run: Path) -> list[str]:
    names = [path.stem.removeprefix("client-") for path in (run / "clients").glob("client-*.safetensors")]
    return sorted(names, key=lambda name: (len(name), name))


def _here(clients: Sequence[str]) -> str:
    if not clients:
        return "none is here: state-dir=out saves them where the clients share the run's disk"
    return f"here: client {', '.join(clients)}"


def _read(path: Path) -> tuple[dict[str, torch.Tensor], Mapping[str, str]]:
    if not path.is_file():
        raise StateError(f"{path} is absent. A run writes it at its end.")
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise StateError(f"{path} cannot be read: {error}") from error
