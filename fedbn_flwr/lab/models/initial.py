"""Initial weights from a file, loaded by name and shape.

A file is ``.safetensors``, or a state dict that torch saved (``.pt``, ``.pth``). The
reader runs no code of the file. Prefixes of wrappers (``module.``, ``_orig_mod.``,
``model.``) are removed if then more names match.

Entries of a BatchNorm layer are loaded only into a BatchNorm layer. The gamma and beta
of another norm have the same names and shapes, but they scale other values.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.training.freezing import layers_of
from fedbn_flwr.training.model_state import load_state
from fedbn_flwr.training.state_file import load_file, open_state

__all__ = ["FILES", "InitReport", "OtherShape", "load_initial"]

FILES = (".safetensors", ".pt", ".pth")
# prefixes that DataParallel, torch.compile and Lightning put before the names of
# entries
_WRAPPERS = ("module", "_orig_mod", "model")
# largest number of names of each kind in a report
_SHOWN = 6


class OtherShape(NamedTuple):
    """An entry with one shape in the file and another in the model."""

    name: str
    there: tuple[int, ...]
    here: tuple[int, ...]


@dataclass(frozen=True)
class InitReport:
    """A report of the entries that were loaded into a model.

    Attributes:
        source: the value of ``init``.
        loaded: the model's entries that were loaded.
        other_shape: the model's entries that have another shape in the source, such as
            a head for other classes; they keep their seeded initial values.
        missing: the model's entries that the source lacks or has only in a layer of
            ``batchnorm``; they keep their seeded initial values.
        unused: entries of the source that the model lacks, by the source's names.
        batchnorm: paths of layers that are BatchNorm only in the source or only in the
            model; their entries are unused.
        at: the place of the entries in the file, such as ``model.state_dict``; "" if
            the file has nothing else.
    """

    source: str
    loaded: tuple[str, ...]
    other_shape: tuple[OtherShape, ...] = ()
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    batchnorm: tuple[str, ...] = ()
    at: str = ""

    @property
    def complete(self) -> bool:
        """Whether every entry of the source and of the model was used."""
        return not (self.other_shape or self.missing or self.unused)

    def __str__(self) -> str:
        """Return the counts, and the first names of each kind."""
        return "\n".join(self.lines(_SHOWN))

    def lines(self, shown: int = 10**9) -> Iterator[str]:
        """Yield a line with the counts, and a line with names for each kind of entry.

        A line has up to ``shown`` names.
        """
        where = f" ({self.at})" if self.at else ""
        yield (
            f"init={self.source}{where}: {len(self.loaded)} entries loaded,"
            f" {len(self.other_shape)} of another shape, {len(self.missing)} missing,"
            f" {len(self.unused)} unused"
        )
        kinds = {
            "another shape, so left at their initial values": [
                f"{name} {there} in the source, {here} in the model"
                for name, there, here in self.other_shape
            ],
            "not in the source, so left at their initial values": self.missing,
            "only in the source, so not used": self.unused,
            "BatchNorm only in the source or only in the model, so left at their"
            " initial values": self.batchnorm,
        }
        for what, names in kinds.items():
            if names:
                more = f" and {len(names) - shown} more" if len(names) > shown else ""
                yield f"{what}: {', '.join(names[:shown])}{more}"


def load_initial(model: nn.Module, init: str) -> InitReport:
    """Load initial weights into ``model``, in place, and return the report.

    Args:
        model: the model with its final layers (after ``replace_norm``).
        init: the absolute path of a file (``FILES``).

    Raises:
        ConfigError: ``init`` is no such file, it cannot be read, a value is not finite,
            or no parameter of the model matches in name and shape.
    """
    # For each entry of the model that the source has, find its name in the source.
    given, at = _chosen(init, _read_file(Path(init)))
    state = model.state_dict()
    names = _renamed(given, state)
    batchnorm = _batchnorm_on_one_side(model, names)
    source = dict[str, str]()
    for there, here in names.items():
        if here in state and _layer_of(here) not in batchnorm:
            source[here] = there
    # Load the entries whose shape fits. A classifier for another number of classes
    # keeps its initial values.
    loaded, other = dict[str, Tensor](), list[OtherShape]()
    for here, there in source.items():
        value, own = given[there], state[here]
        if value.shape == own.shape:
            loaded[here] = value
        else:
            other.append(OtherShape(here, tuple(value.shape), tuple(own.shape)))
    # Refuse a source that fits only in running statistics, because these belong to
    # weights that are not loaded.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if parameters.keys().isdisjoint(loaded):
        raise ConfigError(
            f"init={init}: no parameter of the model has an entry of the same name"
            f" and shape. The first names in the source: {', '.join(list(given)[:3])};"
            f" in the model: {', '.join(list(state)[:3])}."
        )
    _refuse_values(init, loaded, state)
    load_state(model, {**state, **loaded})
    used = set(source.values())
    return InitReport(
        init,
        loaded=tuple(entry for entry in state if entry in loaded),
        other_shape=tuple(other),
        missing=tuple(entry for entry in state if entry not in source),
        unused=tuple(there for there in given if there not in used),
        batchnorm=tuple(batchnorm),
        at=at,
    )


def _chosen(init: str, content: Any) -> tuple[dict[str, Tensor], str]:
    """Return the entries to load from the content of a file, and their place in it."""
    opened = open_state(content)
    if opened.several:
        raise ConfigError(
            f"init={init!r} contains several states: {', '.join(opened.several)}. Save the"
            f" state to load, for example torch.save(torch.load(path)[{opened.several[0]!r}],"
            " other_path)."
        )
    if not opened.entries:
        raise ConfigError(
            f"init={init!r} contains no tensors by name. Save them with"
            " torch.save(model.state_dict(), path)."
        )
    at = opened.at
    if opened.left:
        at += f", and not the other states: {', '.join(opened.left)}"
    return opened.entries, at


def _refuse_values(
    init: str, loaded: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> None:
    """Raise ConfigError if a value is not finite, or no float for a float entry."""
    for name, value in loaded.items():
        if state[name].is_floating_point() and not value.is_floating_point():
            raise ConfigError(
                f"init={init}: {name} ({value.dtype}) has no floating-point numbers."
            )
        # Check after the conversion to the model's dtype, because a large number may
        # become infinite in this dtype.
        if not torch.isfinite(value.to(state[name].dtype)).all():
            raise ConfigError(f"init={init}: {name} is not finite (NaN or infinity).")


def _layer_of(entry: str) -> str:
    return entry.rpartition(".")[0]


def _renamed(given: Mapping[str, Tensor], state: Mapping[str, Any]) -> dict[str, str]:
    """Return the model's name for each given name.

    The function tries unchanged names, names with ``model.`` before them, and names
    without one, two or more prefixes of wrappers. It uses the way with the most names
    that the model has.
    """
    ways = [{name: name for name in given}, {name: f"model.{name}" for name in given}]
    while True:
        shorter = {name: _without_prefix(here) for name, here in ways[-1].items()}
        if shorter == ways[-1]:
            break
        ways.append(shorter)
    # Drop each renaming that gives two entries the same name.
    ways = [way for way in ways if len(set(way.values())) == len(way)]
    # ``max`` returns the first of equal candidates, so names change only if more of
    # them then fit the model.
    return max(ways, key=lambda way: sum(here in state for here in way.values()))


def _without_prefix(name: str) -> str:
    first, _, rest = name.partition(".")
    return rest if first in _WRAPPERS and rest else name


def _batchnorm_on_one_side(model: nn.Module, names: Mapping[str, str]) -> list[str]:
    """Return the paths that are BatchNorm in the source or the model, but not both."""
    # Identify BatchNorm in a source by running statistics, because gamma and beta have
    # the same names in other norms.
    paths, there = set[str](), set[str]()
    for name in names.values():
        path, _, entry = name.rpartition(".")
        paths.add(path)
        if entry == "running_mean":
            there.add(path)
    modules = dict(model.named_modules(remove_duplicate=False))
    here = set[str]()
    for path, layer in layers_of(model, every_path=True).items():
        if layer.running_mean is not None:
            here.add(path)
    return sorted(paths & modules.keys() & (there ^ here))


def _read_file(path: Path) -> Any:
    if path.suffix not in FILES or not path.is_file():
        raise ConfigError(
            f"init={str(path)!r} is not a file. Write the absolute path of a"
            f" {' or '.join(FILES)} file."
        )
    try:
        return load_file(path)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"init={str(path)!r} contains more than tensors, and reading it could run code"
            " from the file. Save only the weights: torch.save(model.state_dict(),"
            " path)."
        ) from error
    # A damaged file may raise any exception in these readers.
    except Exception as error:
        raise ConfigError(f"init={str(path)!r} could not be read: {error}") from error
