"""Load the global model of a finished run, or the own model of a client."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from fedbn_flwr.batchnorm.parts import Part, Parts
from fedbn_flwr.client.personal_model import (
    ABSENT,
    BEFORE_TESTS,
    client_file,
    global_state,
    metadata,
    personal_state,
    read_state,
    site_state,
)
from fedbn_flwr.errors import ConfigError, FedBNError, StateError
from fedbn_flwr.lab.config import Config, method_of
from fedbn_flwr.lab.config.check_config import check_fields
from fedbn_flwr.lab.data import is_own
from fedbn_flwr.lab.models.normalise import normalised_inside
from fedbn_flwr.lab.objects_of_config import in_memory_format
from fedbn_flwr.lab.results.files import CONFIG_FILE, command, refuse_no_run
from fedbn_flwr.lab.results.folder import RunFolder
from fedbn_flwr.lab.results.summary import ModelDescription
from fedbn_flwr.lab.results.tests_table import site_names_of
from fedbn_flwr.messages.site_names import with_name

logger = logging.getLogger("flwr")

# value in the metadata for a part of the model that the server has
GLOBAL = "global"


@dataclass(frozen=True)
class Choice:
    """The choice of a model of a run, by default the global model.

    Attributes:
        client: the own model of the client with this partition id.
        state_dir: the own model of a site. The site's node kept its local state in this
            state folder.
    """

    client: int | None = None
    state_dir: Path | None = None


@dataclass(frozen=True)
class SavedModel:
    """A model of a run.

    Attributes:
        config: the run's settings.
        model: the model in eval mode, on the CPU, in the run's memory format.
        description: the construction, the inputs and the outputs of the model.
        what: a text on the model and on the origin of its BN entries.
    """

    config: Config
    model: nn.Module
    description: ModelDescription
    what: str


def run_config(run: Path) -> Config:
    """Return the settings of a run.

    Raises:
        ConfigError: the folder has no settings, or this version cannot read them.
    """
    refuse_no_run(run)
    try:
        return Config.load(run / CONFIG_FILE)
    # The check of the settings reads own data, and these may be on another machine. Use
    # the settings without a check, because they were checked when the run began.
    except ConfigError:
        values = RunFolder.settings(run)
        config, problems = check_fields(Config, values, complete=False)
        if problems or not is_own(config.dataset):
            raise
        return config


def saved_model(run: Path, choice: Choice) -> SavedModel:
    """Return the chosen model of a run.

    Raises:
        ConfigError: the choice does not fit the run.
        StateError: the folder lacks the model or a part of it; the error names the
            remedy.
    """
    # Until a resumed run ends again, its folder has the model of its earlier end.
    if (run / "checkpoint").is_dir() and not (run / "summary.json").is_file():
        raise StateError(
            f"the run in {run} is not finished, so a model there is from an earlier"
            f" end. Finish it: {command('run', '--out', run, '--resume')}"
        )
    config, about = run_config(run), metadata(run)
    description = ModelDescription.read(about)
    model = description.model()
    state, what = _state(run, config, model, about, choice)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise StateError(
            f"{run}: the entries of {what} do not fit model={config.model},"
            f" norm={config.norm} of config.yaml. Take both files from the same run."
            f" {error}"
        ) from error
    model = in_memory_format(model.eval(), config)
    return SavedModel(config, model, description, what)


def fault_of_model(run: Path) -> str:
    """Return why the saved model of a run cannot be used, or "" if it can be.

    A run may lack the file. Entries are compared only with the model of a complete file,
    and not with a model whose module may not be imported.
    """
    file = run / "model.safetensors"
    if not file.is_file():
        return ""
    try:
        state, about = read_state(file)
        for name, values in state.items():
            if not values.isfinite().all():
                return f"entry '{name}' of model.safetensors has NaN or infinite values"
        if ABSENT not in about.values():
            saved_model(run, Choice())
    except FedBNError as error:
        return "" if error.code == "not-trusted" else str(error)
    return ""


def load_model(
    path: str | Path,
    client: int | None = None,
    *,
    state_dir: str | Path | None = None,
) -> nn.Module:
    """Return a model of a run, a plain torch module in eval mode on the CPU.

    It takes inputs in the form of the data (pixels 0..255): ``module[0]`` normalises
    them, and ``module[1]`` is the network with its state. For a model of the form
    ``module:function``, this imports the module that the run names.

    Args:
        path: the folder of the run, or of ``calibrate``.
        client: the own model of this client. Default: the global model.
        state_dir: the own model of a site, whose node kept its local state there.

    Raises:
        ConfigError: the arguments do not fit the run.
        StateError: the run lacks the model, or a part of it.
    """
    kept = None if state_dir is None else Path(state_dir)
    saved = saved_model(Path(path), Choice(client, kept))
    if changed := saved.description.code_changed():
        logger.warning("%s: %s", path, changed)
    return normalised_inside(saved.model, saved.description.normalise())


def _state(
    run: Path,
    config: Config,
    model: nn.Module,
    about: Mapping[str, str],
    choice: Choice,
) -> tuple[dict[str, Tensor], str]:
    """Return the state of the chosen model, and its description."""
    # num-clients may be 0, because a run over a network counts its nodes.
    client, clients = choice.client, config.num_clients
    if client is not None and clients and not 0 <= client < clients:
        raise ConfigError(
            f"client={client} is unknown: the run has the clients 0 to {clients - 1}."
        )
    parts = method_of(config).parts(model)
    # The model is a site's own model from its state folder, a client's own model from
    # the run's folder, or the global model.
    if choice.state_dir is not None:
        state, client = site_state(run, choice.state_dir, client)
        named = with_name(client, site_names_of(run).get(str(client)))
        what = _what_of_client(config, parts, named, kept_here=True)
        if BEFORE_TESTS in about:
            what += (
                f"; without the {about[BEFORE_TESTS]} before each of its tests, which"
                " only its node makes"
            )
        return state, what
    if client is not None:
        state = personal_state(run, client)
        named = with_name(client, site_names_of(run).get(str(client)))
        if BEFORE_TESTS in about:
            return (
                state,
                f"the own model of client {named}, after {about[BEFORE_TESTS]}",
            )
        kept_here = client_file(run, client).is_file()
        return state, _what_of_client(config, parts, named, kept_here)
    # Only ``calibrate`` writes a description of its model.
    return global_state(run), about.get("what") or _what_of_all(parts, about)


def _what_of_client(config: Config, parts: Parts, client: str, kept_here: bool) -> str:
    local = method_of(config).methods.local
    kept = ", ".join(part for part in Part if part in local and parts.select([part]))
    if kept_here and not kept:
        return f"the own model of client {client}"
    if not kept:
        why = f"under {config.strategy} all clients have it"
    elif kept_here:
        return f"the own model of client {client}, with the {kept} entries that it kept"
    else:
        why = "it kept nothing, since it did not train"
    return f"the global model for client {client}: {why}"


def _what_of_all(parts: Parts, about: Mapping[str, str]) -> str:
    # Group the parts by their source, such as averages over the clients.
    notes: dict[str, list[str]] = {}
    for part in Part:
        source = about.get(part, GLOBAL)
        if source != GLOBAL and parts.select([part]):
            notes.setdefault(source, []).append(part)
    what = "the global model"
    for source, names in notes.items():
        what += f"; its {', '.join(names)} entries: {source}"
    return what
