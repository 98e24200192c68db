"""Initial weights from a file, loaded by name and shape.

The doctor's reader reads the file, and runs no code of it. Names match without the
prefixes of wrappers (``module.``, ``_orig_mod.``, ``model.``).

Entries of a BatchNorm layer are loaded only into a BatchNorm layer. The gamma and beta
of another norm have the same names and shapes, but they scale other values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from fedbn_flwr.doctor.state import open_file
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.training.freezing import layers_of
from fedbn_flwr.training.model_state import load_state, without_wrappers

__all__ = ["InitReport", "load_initial"]

# largest number of names of each kind in a report
_SHOWN = 6


@dataclass(frozen=True)
class InitReport:
    """A report of the entries that were loaded into a model.

    Attributes:
        source: the value of ``init``, and the place of the entries in the file, such as
            ``model.state_dict``.
        loaded: the model's entries that were loaded.
        other_shape: the model's entries that have another shape in the source, such as
            a head for other classes, with both shapes. They keep their seeded initial
            values.
        missing: the model's entries that the source lacks, or has in a layer that is
            BatchNorm on one side only. They keep their seeded initial values.
        unused: the other entries of the source, by the source's names.
    """

    source: str
    loaded: tuple[str, ...]
    other_shape: tuple[str, ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether every entry of the source and of the model was used."""
        return not (self.other_shape or self.missing or self.unused)

    def __str__(self) -> str:
        """Return the counts, and the first names of each kind."""
        lines = [
            f"init={self.source}: {len(self.loaded)} entries loaded,"
            f" {len(self.other_shape)} of another shape, {len(self.missing)} missing,"
            f" {len(self.unused)} unused"
        ]
        kinds = {
            "another shape, so left at their initial values": self.other_shape,
            "not in the source, so left at their initial values": self.missing,
            "only in the source, so not used": self.unused,
        }
        for what, names in kinds.items():
            if names:
                others = len(names) - _SHOWN
                more = f" and {others} more" if others > 0 else ""
                lines.append(f"{what}: {', '.join(names[:_SHOWN])}{more}")
        return "\n".join(lines)


def load_initial(model: nn.Module, init: str) -> InitReport:
    """Load initial weights into ``model``, in place, and return the report.

    Args:
        model: the model with its final layers (after ``replace_norm``).
        init: the absolute path of a file (``STATE_FILES`` of the doctor).

    Raises:
        ConfigError: no parameter of the model matches in name and shape.
        StateError: the file cannot be read, or has no single state.
    """
    # Find the model's name of each entry of the file.
    opened = open_file(Path(init))
    given, state = opened.entries, model.state_dict()
    of_model = {_bare(name): name for name in state}
    names = {there: of_model.get(_bare(there), there) for there in given}
    one_sided = _batchnorm_on_one_side(model, names.values())

    # Load the entries whose shape fits. A classifier for another number of classes
    # keeps its initial values.
    loaded, other, used = dict[str, Tensor](), dict[str, str](), set[str]()
    for there, here in names.items():
        if here not in state or _layer_of(here) in one_sided:
            continue
        used.add(there)
        value, own = given[there], state[here]
        if value.shape == own.shape:
            loaded[here] = value
        else:
            shapes = tuple(value.shape), tuple(own.shape)
            other[here] = "{} {} in the source, {} in the model".format(here, *shapes)

    # Refuse a source that fits only in running statistics, because these belong to
    # weights that are not loaded.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if parameters.keys().isdisjoint(loaded):
        raise ConfigError(
            f"init={init}: no parameter of the model has an entry of the same name"
            f" and shape. The first names in the source: {', '.join(list(given)[:3])};"
            f" in the model: {', '.join(list(state)[:3])}."
        )
    load_state(model, {**state, **loaded})
    at = f" ({opened.at})" if opened.at else ""
    if opened.left:
        at += f", not the other states in the file: {', '.join(opened.left)}"
    return InitReport(
        f"{init}{at}",
        loaded=tuple(entry for entry in state if entry in loaded),
        other_shape=tuple(other.values()),
        missing=tuple(one for one in state if one not in loaded and one not in other),
        unused=tuple(there for there in given if there not in used),
    )


def _bare(name: str) -> str:
    """Return a name without the prefixes of wrappers, also Lightning's ``model.``."""
    return without_wrappers(without_wrappers(name).removeprefix("model."))


def _layer_of(entry: str) -> str:
    return entry.rpartition(".")[0]


def _batchnorm_on_one_side(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Return the paths that are BatchNorm in the source or the model, but not both."""
    # Identify BatchNorm in a source by running statistics, because gamma and beta have
    # the same names in other norms.
    given, there = set[str](), set[str]()
    for name in names:
        given.add(_layer_of(name))
        if name.endswith(".running_mean"):
            there.add(_layer_of(name))
    here = set[str]()
    for path, layer in layers_of(model, every_path=True).items():
        if layer.running_mean is not None:
            here.add(path)
    return given & (there ^ here)
