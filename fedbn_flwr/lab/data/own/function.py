"""The data of a site from a user's function (``dataset=module:function``).

``function(site, part)`` returns a torch ``Dataset`` for the part ``"train"`` or
``"test"``: ``len(d)`` examples, each ``d[i]`` a pair of an input and a target. ``site``
is the ``data-path`` of the node, or else the number of the client (its partition id).
The inputs are used unchanged, as float32: (features,), (channels, length),
(channels, height, width) or (channels, depth, height, width). A target is a class, a
number, several numbers, or a class for each pixel or voxel.

Optional attributes of the data set: ``targets``, the class of each example, so that the
classes can be counted without reading inputs; ``groups``, a number or a text for each
example (a patient). No split separates the examples of one group.

The shape of an input is the shape of the first example. If the server has no example,
the function has an attribute for it: ``function.input_shape = (1, 32, 32)``. The config
then also needs ``task`` and ``num-classes``.

The names of the sites are another attribute, ``function.site_names``: a list with a text
for each site in the order of their numbers, or a function that returns the list, or None
if the names are unknown on this machine.

For a finished model (``known_classes``), an example may be an input without a target, or
a tuple of an input only.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from fedbn_flwr.errors import ConfigError, DataError, FedBNError
from fedbn_flwr.lab.data.datasets import DatasetInfo
from fedbn_flwr.lab.data.own.read_inputs import ReadInputs
from fedbn_flwr.lab.data.own.request import COMPLEX, KINDS, OwnData, chosen_task
from fedbn_flwr.lab.data.readers import Loaded
from fedbn_flwr.lab.data.samples import UNKNOWN, Samples, Shape
from fedbn_flwr.lab.own_code import own_function, own_module, sha256_of_code
from fedbn_flwr.messages.site_names import fault_of_list, with_name
from fedbn_flwr.training.losses import IGNORED_PIXEL
from fedbn_flwr.training.tasks import CLASSIFICATION, TASKS, Task

_PARTS = ("train", "test")
# largest number of classes if nothing states the number; a larger target is not a class
_MOST = 1000


@dataclass(frozen=True, eq=False)
class Site:
    """One part of the data of one site, as the function returned it.

    Attributes:
        name: the name in messages.
        data: the data set.
        groups: the data set's ``groups``, a value for each example, or None.
        classes: the data set's ``targets`` if they are classes, or None.
    """

    name: str
    data: Any
    groups: tuple[Any, ...] | None
    classes: tuple[int, ...] | None

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.data)


def site_names(request: OwnData) -> tuple[str, ...]:
    """Return the name of each site (a client of the split).

    Raises:
        ConfigError: there is no such function.
        DataError: its ``site_names`` are not a name for each site.
    """
    names = _given_names(request)
    if names:
        return names
    return tuple(
        f"site-{site}" if isinstance(site, int) else site for site in request.sites
    )


def _given_names(request: OwnData) -> tuple[str, ...]:
    """Return the function's ``site_names``, or () if it has none."""
    # Only the server uses the function's names. A node has only its own site, and the
    # node's config has its name.
    if request.of_node:
        return ()
    what = f"dataset={request.name!r}: site_names"
    given = getattr(own_function("dataset", request.path, KINDS), "site_names", None)
    if callable(given):
        given = _called(what, given)
    if given is None:
        return ()
    # Refuse a single text. Otherwise it would count as a list of its characters.
    names = () if isinstance(given, str) else tuple(_called(what, iter, given))
    fault = fault_of_list(names)
    if not names or (request.sites and len(names) != len(request.sites)):
        fault = (
            f"it has {len(names)} names, but the run has {len(request.sites)} sites"
            " (num-clients and the held-out clients). Give a list with a text for each"
            " site, in the order of their numbers."
        )
    if fault:
        raise DataError(f"{what}: {fault}")
    return names


class _InputsOnly:
    """A data set whose examples all have the target ``UNKNOWN``."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, at: int) -> tuple[Any, int]:
        example = self._data[at]
        return example[0] if isinstance(example, (tuple, list)) else example, UNKNOWN


def _sites(request: OwnData) -> dict[str, list[Site]]:
    parts = sites_of(request.path, request.sites, _given_names(request))
    if request.known_classes:
        parts = {
            part: [*map(_maybe_unlabelled, sites)] for part, sites in parts.items()
        }
    return parts


def _maybe_unlabelled(site: Site) -> Site:
    """Return a site whose data have targets, ``UNKNOWN`` if the first example has none."""
    if not len(site):
        return site
    example = _called(f"{site.name}, example 0", site.data.__getitem__, 0)
    if isinstance(example, (tuple, list)) and len(example) > 1:
        return site
    classes = (UNKNOWN,) * len(site)
    return replace(site, data=_InputsOnly(site.data), classes=classes)


# Cached, because the user's function may read files, and several callers ask for its
# data.
@functools.lru_cache(maxsize=8)
def sites_of(
    name: str, sites: tuple[int | str, ...], names: tuple[str, ...] = ()
) -> dict[str, list[Site]]:
    """Return the data of all sites, by part ("train" and "test").

    Args:
        name: ``module:function``.
        sites: the sites, by number or path.
        names: their names, or () without names.

    Raises:
        ConfigError: no site is known, or there is no such function.
        DataError: the function fails for a site, or returns no data set.
    """
    if not sites:
        raise ConfigError(
            f"dataset={name!r} is a function of the site, but the number of sites is"
            " unknown. Set num-clients. If only the nodes have the data, set task and"
            " num-classes, and set the shape of an input as an attribute of the"
            f" function: {name.partition(':')[2]}.input_shape = (features,)."
        )
    function = own_function("dataset", name, KINDS)
    parts = dict[str, list[Site]]()
    for part in _PARTS:
        parts[part] = []
        for site, its_name in zip_longest(sites, names):
            named = with_name(site, its_name)
            what = f"dataset={name!r}, site {named}, part {part!r}"
            parts[part].append(_site(what, _called(what, function, site, part)))
    return parts


def _site(what: str, data: Any) -> Site:
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise DataError(
            f"{what}: the function returned a {type(data).__name__}. Return a torch"
            " Dataset with a length."
        )
    classes = _values(what, data, "targets")
    # If targets are not integers, they are not classes. Such targets are read later,
    # with the inputs.
    if classes is not None and not all(type(value) is int for value in classes):
        classes = None
    return Site(what, data, _values(what, data, "groups"), classes)


def _values(what: str, data: Any, attribute: str) -> tuple[Any, ...] | None:
    """Return the values of a data set's attribute, or None if it is absent.

    Raises:
        DataError: the attribute does not have one value for each example.
    """
    given = getattr(data, attribute, None)
    if given is None:
        return None
    values = tuple(np.asarray(given).tolist())
    if len(values) != len(data):
        raise DataError(
            f"{what}: expected one value of {attribute} per example, but got"
            f" {len(values)} values for {len(data)} examples."
        )
    return values


def _called(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except FedBNError:
        raise
    # The user's code may raise anything.
    except Exception as error:
        raise DataError(f"{what}: {type(error).__name__}: {error}") from error


def _example(
    site: Site, at: int, task: Task | None, shape: tuple[int, ...], classes: int
) -> tuple[Tensor, Tensor]:
    """Return a checked input as float32, and its target in the dtype of ``Samples``.

    Args:
        site: the part of a site.
        at: number of the example in this part.
        task: the learning task; None returns the target unchanged.
        shape: the shape of all inputs; () accepts any shape.
        classes: number of the classes or columns; 0 accepts any number.

    Raises:
        DataError: the example cannot be read, or does not fit.
    """
    where = f"{site.name}, example {at}"
    inputs, target = _called(where, _as_pair, site.data, at)
    # Check each example here, because no other place reads all examples.
    if inputs.dtype == torch.uint8 or not 1 <= inputs.ndim <= 4:
        raise DataError(
            f"{where} has inputs {inputs.dtype} of shape {tuple(inputs.shape)}. Return"
            " numbers as the model takes them (images: image.float() / 255), of shape"
            " (features,), (channels, length), (channels, height, width) or (channels,"
            " depth, height, width)."
        )
    inputs = inputs.to(torch.float32)
    if shape and tuple(inputs.shape) != shape:
        raise DataError(
            f"{where} has inputs of shape {tuple(inputs.shape)}, but the run has"
            f" {shape}. The function must return one shape at all sites: crop, pad or"
            " resample there."
        )
    if not inputs.isfinite().all():
        raise DataError(
            f"{where} has inputs that are NaN or infinite. Replace them in the"
            " function."
        )
    if task is not None and not isinstance(site.data, _InputsOnly):
        target = _target(where, target, task, tuple(inputs.shape[1:]), classes)
    return inputs, target


def _as_pair(data: Any, at: int) -> tuple[Tensor, Tensor]:
    """Return input and target of an example as plain tensors."""
    example = data[at]
    if not isinstance(example, (tuple, list)) or len(example) != 2:
        raise TypeError(
            f"got a {type(example).__name__}. Return a pair of input and target"
        )
    return _as_tensor(example[0]), _as_tensor(example[1])


def _as_tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        array = np.array(value)
        if array.dtype.kind not in "biufc":
            raise TypeError(f"{value!r} is not a number. Number the classes from 0")
        value = torch.from_numpy(array)
    if value.is_complex():
        raise TypeError(f"complex numbers ({value.dtype}). {COMPLEX}")
    # Some libraries have their own class of tensors that torch cannot stack, such as
    # MONAI's MetaTensor.
    plain: Tensor = value.as_subclass(Tensor).detach()
    return plain


def _target(
    where: str, target: Tensor, task: Task, pixels: tuple[int, ...], classes: int
) -> Tensor:
    """Return a target in the dtype of ``Samples``.

    Raises:
        DataError: it does not fit the task; the message begins with ``where``.
    """
    # The task requires a shape of the target, and numbers or classes below a limit.
    shape: tuple[int, ...] = ()
    dtype, limit = torch.int64, classes or _MOST
    if task.by_pixel:
        shape, dtype = pixels, torch.uint8
    elif task.name == "binary":
        limit = 2
    elif task.name != "classification":
        dtype, limit = torch.float32, 0
        columns = task.outputs(classes)
        if columns > 1 or task.name != "regression":
            shape = (columns,)
    # Accept one additional leading dimension of 1, because many libraries put it before
    # a mask or a class.
    fits = tuple(target.shape) in (shape, (1, *shape))
    if limit:
        known = target[target != IGNORED_PIXEL] if task.by_pixel else target
        are_classes = (known == known.long()) & (known >= 0) & (known < limit)
        fits = fits and bool(are_classes.all())
    if not fits:
        values = f", {target.min()} to {target.max()}" if target.numel() else ""
        needed = f"classes 0 to {limit - 1}" if limit else "numbers"
        raise DataError(
            f"{where} has a target {target.dtype} of shape"
            f" {tuple(target.shape)}{values}. Task {task.name} needs {needed} of shape"
            f" {shape}."
        )
    return target.reshape(shape).to(dtype)


@functools.lru_cache(maxsize=8)
def function_info(request: OwnData) -> DatasetInfo:
    """Return the description of the data, reading as few examples as possible.

    Raises:
        ConfigError: the config must set ``task`` or ``num-classes``, no site is known,
            or there is no such function.
        DataError: the function fails for a site, or its data do not fit the config or
            the other sites.
    """
    names = site_names(request)
    # Take the shape, the task and the number of classes from the function's attributes
    # and the config.
    function = own_function("dataset", request.path, KINDS)
    shape = tuple(getattr(function, "input_shape", ()))
    task = chosen_task(request, request.task, tuple(TASKS)) if request.task else None
    classes = 1 if request.task == "binary" else request.num_classes
    # Read an example only if one of these facts is missing, because the server may have
    # no site to read from.
    if not shape or task is None or not classes:
        sites = _sites(request)
        with_examples = [site for site in sites["train"] if len(site)]
        # A site without training has only the part "test".
        if request.known_classes:
            with_examples += [site for site in sites["test"] if len(site)]
        if not with_examples:
            raise request.problem("no site has a training example.")
        inputs, target = _example(with_examples[0], 0, None, shape, 0)
        shape = tuple(inputs.shape)
        task = task or _task_of(request, target)
        classes = classes or _count(request, task, target)
    return DatasetInfo(
        request.name,
        num_classes=classes,
        channels=0,
        size=0,
        summary="own data of a function",
        source="own data",
        loader=functools.partial(_load, request, shape, task, classes),
        files="",
        mean=(),
        std=(),
        grouped=True,
        task=task,
        input_shape=shape,
        client_names=names,
    )


def _task_of(request: OwnData, target: Tensor) -> Task:
    """Return the task "classification" if a target is a class.

    Raises:
        ConfigError: the target is no class, so the config must set ``task``.
    """
    if target.numel() == 1 and not target.is_floating_point():
        return CLASSIFICATION
    raise ConfigError(
        f"dataset={request.name!r}: a target is {target.dtype} of shape"
        f" {tuple(target.shape)}. Set its kind: task=segmentation, regression,"
        " multi-label or binary."
    )


def _count(request: OwnData, task: Task, target: Tensor) -> int:
    """Return the number of classes, or of the numbers in a target.

    Raises:
        ConfigError: targets are classes of pixels, so ``num-classes`` must be set.
    """
    if task.by_pixel:
        raise ConfigError(
            f"dataset={request.name!r}: set num-classes, the number of classes of the"
            " pixels or voxels."
        )
    if task.name != "classification":
        return max(target.numel(), 1)
    # Look at the test examples as well, because a site may have a test class without a
    # training example.
    largest = 0
    for sites in _sites(request).values():
        for site in sites:
            largest = max([largest, *_classes_of(site, 0)])
    return largest + 1


def _classes_of(site: Site, classes: int) -> Sequence[int]:
    """Return the class of each example. This reads the examples without ``targets``."""
    if site.classes is None:
        found = []
        for at in range(len(site)):
            _, target = _example(site, at, CLASSIFICATION, (), classes)
            found.append(int(target))
        return found
    # Check only the smallest and the largest value. If these are classes of the model,
    # all values between them are.
    if site.classes and not isinstance(site.data, _InputsOnly):
        for value in (min(site.classes), max(site.classes)):
            _target(site.name, torch.tensor(value), CLASSIFICATION, (), classes)
    return site.classes


def _load(
    request: OwnData,
    shape: tuple[int, ...],
    task: Task,
    classes: int,
    folder: Path,
    wanted: Shape,
) -> Loaded:
    """Return the training and the test examples of all sites.

    The examples of a ``TensorDataset`` are in memory. Examples of other data sets are
    read at each use, because a data set may augment.
    """
    del folder, wanted
    parts = _sites(request)
    # Without targets, each example has the class UNKNOWN, whatever the task is.
    if any(isinstance(site.data, _InputsOnly) for site in parts["test"]):
        task = CLASSIFICATION
    # Read the first example of every site before any other work, to find sites with
    # another shape or other classes.
    for sites in parts.values():
        for site in sites:
            if len(site):
                _example(site, 0, task, shape, classes)
    # Number the groups of training and test together, because a patient may be in both.
    unit_numbers: dict[Any, int] = {}
    for sites in parts.values():
        for site in sites:
            for value in site.groups or ():
                unit_numbers.setdefault(value, len(unit_numbers))
    train, test = (
        _examples(parts[part], task, shape, classes, unit_numbers) for part in _PARTS
    )
    return Loaded(train, test, site_names(request))


def _examples(
    sites: Sequence[Site],
    task: Task,
    shape: tuple[int, ...],
    classes: int,
    unit_numbers: dict[Any, int],
) -> Samples:
    """Return the examples of one part of all sites.

    Each site is a group of the samples. The ``groups`` of a site (patients) are units.
    """
    # List the site of each example, its position there, and its unit. An example
    # without a group is its own unit, numbered after the groups.
    places: list[tuple[Site, int]] = []
    groups, units = list[int](), list[int]()
    for which, site in enumerate(sites):
        for at in range(len(site)):
            unit = len(unit_numbers) + len(places)
            if site.groups is not None:
                unit = unit_numbers[site.groups[at]]
            places.append((site, at))
            groups.append(which)
            units.append(unit)

    def read(at: int) -> tuple[Tensor, Tensor]:
        return _example(*places[at], task, shape, classes)

    of_sites = torch.tensor(groups, dtype=torch.int64)
    of_units = torch.tensor(units) if unit_numbers else None
    # Data sets of tensors are in memory anyway and return equal values each time, so
    # read them once.
    if places and all(isinstance(site.data, TensorDataset) for site in sites):
        inputs, targets = zip(*map(read, range(len(places))), strict=True)
        return Samples(torch.stack(inputs), torch.stack(targets), of_sites, of_units)
    # Read the classes now, because splits by class need them. Other targets are read
    # later, with the inputs.
    labels = None
    if task.name in ("classification", "binary"):
        classes_of_all = list[int]()
        for site in sites:
            classes_of_all += _classes_of(site, max(classes, 2))
        labels = torch.tensor(classes_of_all, dtype=torch.int64)
    read_inputs = ReadInputs(read, len(places), shape, task.by_pixel)
    return Samples(read_inputs, labels, of_sites, of_units)


def function_sha256(request: OwnData) -> str:
    """Return the SHA-256 of the function's file and of its data sets' attributes.

    The attributes are the number of examples, the groups and the classes. Examples are
    not read, so other changes of the examples do not change the digest.

    Raises:
        ConfigError: no site is known, or there is no such function.
        DataError: the function fails for a site, or returns no data set.
    """
    module = own_module("dataset", request.path, KINDS)
    digest = hashlib.sha256(sha256_of_code(module).encode())
    for part, sites in _sites(request).items():
        for site in sites:
            digest.update(f"{part} {len(site)} {site.groups} {site.classes}\n".encode())
    return digest.hexdigest()
