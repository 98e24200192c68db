"""The model of a finished run, and a client's own model.

A client's own model consists of the shared entries and the client's local state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.checked_file import read_checked
from fedbn_flwr.client.kept import own_entries
from fedbn_flwr.errors import ConfigError, StateError
from fedbn_flwr.messages.records import tensors

ABSENT = "absent: it stays with the clients"
"""The metadata of ``model.safetensors`` for a part of the state that is left out."""

AVERAGED = "the average over the clients, which keep their own"
"""The metadata of ``model.safetensors`` for a part of the state that is the average of
the clients' local states.
"""

BEFORE_TESTS = "before-tests"
"""The metadata of ``model.safetensors`` with the change that each client makes to its
model before a test, in words.
"""

KEPT_HASHES = "kept-sha256"
"""The metadata of ``model.safetensors`` with the SHA-256 of each client's local state
at the end of the run, as JSON.
"""


def client_file(run: Path, client: int | str) -> Path:
    """Return the file with the local state of a client."""
    return run / "clients" / f"client-{client}.safetensors"


def why_absent(absent: Sequence[str], clients: Sequence[str]) -> str:
    """Return the reason why ``model.safetensors`` lacks these parts, and the remedy.

    Args:
        absent: the parts.
        clients: the clients with a file in the run's folder.
    """
    text = (
        f"model.safetensors has no {', '.join(absent)} entries: they stay with the"
        " clients, and the server has only their initial values."
        " `fedbn-flwr evaluate RUN --dataset DATA --client N` tests a client's own model, and"
        f" fedbn_flwr.personal_state(run, client) returns its state ({_here(clients)})."
    )
    if Part.REST in absent:
        return f"{text} Nothing is shared, so there is no global model."
    return (
        f"{text} Without dp, a run with eval-on=averaged-bn saves the"
        " average of the clients' entries."
    )


def global_state(run: str | Path) -> dict[str, torch.Tensor]:
    """Return the state of a finished run's global model.

    ``model.load_state_dict`` loads it.

    Args:
        run: the output folder.

    Raises:
        StateError: the folder has no model, or the model lacks entries, because they
            stay with the clients.
    """
    state, absent = _shared(Path(run))
    if absent:
        raise StateError(f"{run}: {why_absent(absent, _clients(Path(run)))}")
    return state


def personal_state(run: str | Path, client: int) -> dict[str, torch.Tensor]:
    """Return the state of a client's own model after a run.

    It is the model that ``personal-own`` tested in the last round, after ``fine-tune``
    and ``recalibrate``: the shared entries, and the client's local state. A client without
    local state has the global model, if that is complete: if nothing stays with the
    clients, or with ``eval-on=averaged-bn``.

    Args:
        run: the output folder of a run whose clients shared its disk
            (``state-dir=out``).
        client: the partition id.

    Raises:
        StateError: the folder lacks the model or this client's local state. The error
            names the place of the missing state or the command that creates it.
    """
    folder = Path(run)
    state, absent = _shared(folder)
    file = client_file(folder, client)
    if file.is_file():
        return {**state, **read_state(file)[0]}
    about = metadata(folder)
    if BEFORE_TESTS in about:
        raise StateError(
            f"{run}: the model of client={client} after its {about[BEFORE_TESTS]} is not"
            f" here ({_here(_clients(folder))}). To make it, run"
            f" `fedbn-flwr run --out {quote(str(run))} --resume` on a machine that has the data and"
            " the clients' local state."
        )
    # There is no file: the client never had local state, or it is on another disk. The
    # hashes in the model's metadata tell the two apart.
    if absent or str(client) in json.loads(about.get(KEPT_HASHES, "{}")):
        raise StateError(
            f"{run}: the local state of client={client} is not here"
            f" ({_here(_clients(folder))}). If the client trained in this run, load its"
            " model on its node, with `load_model(RUN, state_dir=DIR)`."
        )
    return state


class SiteState(NamedTuple):
    """A site's own model, with its state and its partition id."""

    state: dict[str, torch.Tensor]
    client: int


def site_state(
    run: str | Path, state_dir: str | Path, client: int | None = None
) -> SiteState:
    """Return the state of a site's own model from the site's state folder.

    The model consists of the shared entries and the local state. The local state never
    left the site. The server has only its SHA-256, which prevents the use of another
    run's entries.

    Args:
        run: a folder with ``model.safetensors`` of the run.
        state_dir: the state folder of the site's node.
        client: the partition id; None selects the only client in the folder.

    Raises:
        StateError: the folder has no file from the end of this run.
        ConfigError: the folder has several clients of this run, and ``client`` is None.
    """
    # The server has only hashes. They identify the files from the end of this run.
    state, _ = _shared(Path(run))
    expected = json.loads(metadata(run).get(KEPT_HASHES, "{}"))
    if not expected:
        raise StateError(
            f"{run}: model.safetensors names no local state of its clients. They kept"
            " nothing in this run (leave --state-dir out)."
        )
    found = {
        int(client): path
        for client, sha256 in expected.items()
        for path in Path(state_dir).glob(f"*/*/*.{sha256}.safetensors")
    }
    # Select the requested client, or the only one.
    if client is None and len(found) > 1:
        here = ", ".join(map(str, sorted(found)))
        raise ConfigError(
            f"{state_dir} has the local states of several clients of this run: {here}."
            " Choose one with --client."
        )
    chosen = next(iter(found), None) if client is None else client
    if chosen is None or chosen not in found:
        who = "a client" if client is None else f"client={client}"
        raise StateError(
            f"{state_dir} has no local state of {who} from the end of the run in {run}."
            " Give the state folder of the node that took part in this run, and the"
            " model.safetensors of this run."
        )
    kept = tensors(own_entries(read_checked(found[chosen])))
    return SiteState({**state, **kept}, chosen)


def metadata(run: str | Path) -> Mapping[str, str]:
    """Return the metadata of a run's ``model.safetensors``."""
    return read_state(Path(run) / "model.safetensors")[1]


def _shared(run: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the entries of ``model.safetensors``, and the parts that it lacks."""
    state, about = read_state(run / "model.safetensors")
    return state, [part for part in Part if about.get(part) == ABSENT]


def _clients(run: Path) -> list[str]:
    names = [
        path.stem.removeprefix("client-")
        for path in (run / "clients").glob("client-*.safetensors")
    ]
    # Sort by length first, so that 2 comes before 10.
    return sorted(names, key=lambda name: (len(name), name))


def _here(clients: Sequence[str]) -> str:
    if not clients:
        return (
            "none is in the run's folder: state-dir=out saves them there, if the"
            " clients share its disk"
        )
    return f"here: client {', '.join(clients)}"


def read_state(path: Path) -> tuple[dict[str, torch.Tensor], Mapping[str, str]]:
    """Return the entries and the metadata of a safetensors file of a run.

    Raises:
        StateError: the file is absent or cannot be read.
    """
    if not path.is_file():
        raise StateError(f"{path} is missing. A run writes it at its end.")
    try:
        with safe_open(path, "pt") as file:
            names = file.keys()  # the file itself cannot be iterated
            entries = {name: file.get_tensor(name) for name in names}
            return entries, file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise StateError(f"{path} cannot be read: {error}") from error
