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

The data of an ``OwnTask`` are other: an example is a pair of any objects, and the
``collate_fn`` of the function, or else torch's, makes a batch of a list of examples, a
pair of inputs and targets of any structure.

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
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset, default_collate

from fedbn_flwr.errors import ConfigError, DataError, FedBNError
from fedbn_flwr.lab.data.datasets import DatasetInfo
from fedbn_flwr.lab.data.forms.request import KINDS, OwnData, chosen_task
from fedbn_flwr.lab.data.readers import Loaded
from fedbn_flwr.lab.data.samples import UNKNOWN, LazyInputs, Samples, Shape
from fedbn_flwr.lab.own_code import (
    is_function,
    own_function,
    own_module,
    sha256_of_code,
)
from fedbn_flwr.messages.site_names import fault_of_list, with_name
from fedbn_flwr.training.losses import IGNORED_PIXEL
from fedbn_flwr.training.own_task import OwnTask
from fedbn_flwr.training.tasks import CLASSIFICATION, TASKS, Task

_PARTS = ("train", "test")
_OF_CLASSES = ("classification", "binary")
# largest number of classes if nothing states the number; a larger target is not a class
_MOST = 1000


@dataclass(frozen=True)
class ExampleForm:
    """The form of every example of a run.

    Attributes:
        task: the learning task.
        shape: the shape of an input; () accepts any shape. For a user's task, the shape
            of the first tensor in the first input.
        classes: number of the classes or columns; 0 accepts any number.
        collate: makes a batch for a user's task of a list of examples.
    """

    task: Task
    shape: tuple[int, ...]
    classes: int
    collate: Callable[[list[Any]], Any] = default_collate

    @property
    def of_targets(self) -> tuple[tuple[int, ...], torch.dtype, int]:
        """Shape and dtype of a target, and the limit of classes; 0 for numbers."""
        task, limit = self.task, self.classes or _MOST
        if task.by_pixel:
            return self.shape[1:], torch.uint8, limit
        if task.name in _OF_CLASSES:
            return (), torch.int64, 2 if task.name == "binary" else limit
        columns = task.outputs(self.classes)
        if columns == 1 and task.name == "regression":
            return (), torch.float32, 0
        return (columns,), torch.float32, 0

    def checked(self, where: str, target: Tensor) -> Tensor:
        """Return a target in the dtype of ``Samples``.

        Raises:
            DataError: it does not fit the task; the message begins with ``where``.
        """
        shape, dtype, limit = self.of_targets
        # Accept one additional leading dimension of 1, because many libraries put it
        # before a mask or a class.
        fits = tuple(target.shape) in (shape, (1, *shape))
        if limit:
            known = target[target != IGNORED_PIXEL] if self.task.by_pixel else target
            are_classes = (known == known.long()) & (known >= 0) & (known < limit)
            fits = fits and bool(are_classes.all())
        if not fits:
            values = f", {target.min()} to {target.max()}" if target.numel() else ""
            needed = f"classes 0 to {limit - 1}" if limit else "numbers"
            raise DataError(
                f"{where} has a target {target.dtype} of shape"
                f" {tuple(target.shape)}{values}. Task {self.task.name} needs {needed} of"
                f" shape {shape}."
            )
        return target.reshape(shape).to(dtype)


@dataclass(frozen=True, eq=False)
class Site:
    """One part of the data of one site, as the function returned it.

    Attributes:
        name: the name in messages.
        data: the data set.
        groups: the data set's ``groups``, a value for each example, or None.
        classes: the data set's ``targets`` if they are classes, or None.
        labelled: whether the examples have targets; otherwise their class is
            ``UNKNOWN``.
    """

    name: str
    data: Any
    groups: tuple[Any, ...] | None
    classes: tuple[int, ...] | None
    labelled: bool = True

    @classmethod
    def of(cls, name: str, data: Any) -> Site:
        """Return the site of a data set.

        Raises:
            DataError: it is no data set, or an attribute does not fit it.
        """
        if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            raise DataError(
                f"{name}: the function returned a {type(data).__name__}. Return a torch"
                " Dataset with a length."
            )
        found = []
        for attribute in ("targets", "groups"):
            values = getattr(data, attribute, None)
            if values is not None:
                values = tuple(np.asarray(values).tolist())
                if len(values) != len(data):
                    raise DataError(
                        f"{name}: expected one value of {attribute} per example, but"
                        f" got {len(values)} values for {len(data)} examples."
                    )
            found.append(values)
        classes, groups = found
        # If targets are not integers, they are not classes. Such targets are read
        # later, with the inputs. So are targets that the data set transforms.
        if classes and not all(type(value) is int for value in classes):
            classes = None
        if classes and not _are_of_items(name, classes, data):
            classes = None
        return cls(name, data, groups, classes)

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.data)

    def maybe_unlabelled(self) -> Site:
        """Return this site, without labels if the first example has no target."""
        if not len(self):
            return self
        example = _called(f"{self.name}, example 0", self.data.__getitem__, 0)
        if isinstance(example, (tuple, list)) and len(example) > 1:
            return self
        return replace(self, labelled=False, classes=(UNKNOWN,) * len(self))

    def read(self, at: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return a checked input as float32, and its target unchanged.

        Args:
            at: number of the example.
            shape: the shape of all inputs; () accepts any shape.

        Raises:
            DataError: the example cannot be read, or does not fit.
        """
        where = f"{self.name}, example {at}"
        inputs, target = _called(where, _as_tensors, self.pair(at))
        # Check each example here, because no other place reads all examples.
        if inputs.dtype == torch.uint8 or not 1 <= inputs.ndim <= 4:
            raise DataError(
                f"{where} has inputs {inputs.dtype} of shape {tuple(inputs.shape)}."
                " Return numbers as the model takes them (images: image.float() / 255),"
                " of shape (features,), (channels, length), (channels, height, width)"
                " or (channels, depth, height, width)."
            )
        inputs = inputs.to(torch.float32)
        if shape and tuple(inputs.shape) != shape:
            raise DataError(
                f"{where} has inputs of shape {tuple(inputs.shape)}, but the run has"
                f" {shape}. The function must return one shape at all sites: crop, pad"
                " or resample there."
            )
        if not inputs.isfinite().all():
            raise DataError(
                f"{where} has inputs that are NaN or infinite. Replace them in the"
                " function."
            )
        return inputs, target

    def pair(self, at: int) -> tuple[Any, Any]:
        """Return input and target of an example.

        Raises:
            DataError: the example cannot be read, or is no pair.
        """
        where = f"{self.name}, example {at}"
        example = _called(where, self.data.__getitem__, at)
        if not self.labelled:
            alone = example[0] if isinstance(example, (tuple, list)) else example
            return alone, UNKNOWN
        if not isinstance(example, (tuple, list)) or len(example) != 2:
            raise DataError(
                f"{where}: got a {type(example).__name__}. Return a pair of input and"
                " target"
            )
        return example[0], example[1]

    def example(self, at: int, form: ExampleForm) -> tuple[Tensor, Tensor]:
        """Return an input and its target in the dtypes of ``Samples``.

        Raises:
            DataError: the example cannot be read, or does not fit.
        """
        inputs, target = self.read(at, form.shape)
        if self.labelled:
            target = form.checked(f"{self.name}, example {at}", target)
        return inputs, target

    def labels(self, classes: int) -> Sequence[int]:
        """Return the class of each example, read from the data without ``targets``.

        ``classes`` is the number of classes; 0 accepts any number.
        """
        form = ExampleForm(CLASSIFICATION, (), classes)
        if self.classes is None:
            return [int(self.example(at, form)[1]) for at in range(len(self))]
        # Check only the smallest and the largest value. If these are classes of the
        # model, all values between them are.
        if self.classes and self.labelled:
            for value in (min(self.classes), max(self.classes)):
                form.checked(self.name, torch.tensor(value))
        return self.classes


def _are_of_items(name: str, classes: Sequence[int], data: Any) -> bool:
    """Return whether an example of each class has this class as its target."""
    for value in set(classes):
        at = classes.index(value)
        example = _called(f"{name}, example {at}", data.__getitem__, at)
        if isinstance(example, (tuple, list)) and len(example) > 1:
            target = np.asarray(example[1])
            if target.size != 1 or target.item() != value:
                return False
    return True


def _as_tensors(pair: tuple[Any, Any]) -> tuple[Tensor, Tensor]:
    return _as_tensor(pair[0]), _as_tensor(pair[1])


def _as_tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        array = np.array(value)
        if array.dtype.kind not in "biufc":
            raise TypeError(f"{value!r} is not a number. Number the classes from 0")
        value = torch.from_numpy(array)
    if value.is_complex():
        raise TypeError(
            f"complex numbers ({value.dtype}). The model takes real numbers: return the"
            " real and the imaginary part as two channels (torch.view_as_real), or the"
            " magnitude (torch.abs)"
        )
    # Some libraries have their own class of tensors that torch cannot stack, such as
    # MONAI's MetaTensor.
    plain: Tensor = value.as_subclass(Tensor).detach()
    return plain


def _called(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except FedBNError:
        raise
    # The user's code may raise anything.
    except Exception as error:
        raise DataError(f"{what}: {type(error).__name__}: {error}") from error


class ReadInputs(LazyInputs):
    """The examples of sites, read from the user's data sets each time they are used."""

    dtype = torch.float32

    def __init__(self, sites: Sequence[Site], form: ExampleForm) -> None:
        self._places = [(site, at) for site in sites for at in range(len(site))]
        self._form, self.by_pixel = form, form.task.by_pixel
        self.shape = (len(self._places), *form.shape)

    def read(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the inputs with these numbers, and their targets."""
        shape, dtype, _ = self._form.of_targets
        inputs = torch.empty(len(numbers), *self.shape[1:])
        targets = torch.empty(len(numbers), *shape, dtype=dtype)
        for row, number in enumerate(numbers):
            site, at = self._places[number]
            inputs[row], targets[row] = site.example(at, self._form)
        return inputs.to(self.device), targets.to(self.device)


class ReadBatches(ReadInputs):
    """The examples for a user's task, in batches as its ``collate_fn`` makes them."""

    as_given = True

    def __init__(self, sites: Sequence[Site], form: ExampleForm) -> None:
        super().__init__(sites, form)
        self._collate = form.collate

    def read(self, numbers: Sequence[int]) -> tuple[Any, Any]:
        """Return the batch of the examples with these numbers.

        Raises:
            DataError: an example cannot be read, or the batch is no pair.
        """
        places = [self._places[number] for number in numbers]
        pairs = [site.pair(at) for site, at in places]
        what = f"{places[0][0].name}: collate_fn of {len(pairs)} examples"
        batch = _called(what, self._collate, pairs)
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise DataError(
                f"{what} returned a {type(batch).__name__}. Return a pair (inputs,"
                " targets)"
            )
        return batch[0], batch[1]


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
            parts[part].append(Site.of(what, _called(what, function, site, part)))
    return parts


# Cached like the data, because the names may be read from a file.
@functools.lru_cache(maxsize=8)
def names_given(name: str) -> tuple[str, ...] | None:
    """Return the ``site_names`` of a function, or None if it has none.

    Args:
        name: ``module:function``.

    Raises:
        ConfigError: there is no such function.
        DataError: ``site_names`` fails.
    """
    what = f"dataset={name!r}: site_names"
    given = getattr(own_function("dataset", name, KINDS), "site_names", None)
    if callable(given):
        given = _called(what, given)
    if given is None:
        return None
    # Refuse a single text. Otherwise it would count as a list of its characters.
    return () if isinstance(given, str) else tuple(_called(what, iter, given))


class OwnSites:
    """The data of a user's function, for the sites of a request."""

    divided = True
    """The function returns training and test examples in separate calls."""

    def __init__(self, request: OwnData) -> None:
        """Keep the request. The function is called when its data are needed."""
        self._request = request

    @functools.cached_property
    def _names(self) -> tuple[str, ...]:
        """The function's ``site_names``, or () if it has none."""
        # Only the server of a run uses the function's names. A node has only its own
        # site, and the node's config has its name. New data are those of one site.
        request = self._request
        if request.of_node or request.known_classes:
            return ()
        names = names_given(request.name)
        if names is None:
            return ()
        fault = fault_of_list(names)
        if not names or (request.sites and len(names) != len(request.sites)):
            fault = (
                f"it has {len(names)} names, but the run has {len(request.sites)} sites"
                " (num-clients and the held-out clients). Set num-clients to the number"
                " of sites, or give a list with a text for each site, in their order."
            )
        if fault:
            raise DataError(f"dataset={request.name!r}: site_names: {fault}")
        return names

    @functools.cached_property
    def _sites(self) -> dict[str, list[Site]]:
        request = self._request
        parts = sites_of(request.path, request.sites, self._names)
        if request.known_classes and not is_function(request.task):
            parts = {part: [*map(Site.maybe_unlabelled, parts[part])] for part in parts}
        return parts

    @functools.cached_property
    def _form(self) -> ExampleForm:
        """The form of the examples, from as few examples as possible."""
        # Take the shape, the task and the number of classes from the function's
        # attributes and the config.
        request = self._request
        function = own_function("dataset", request.path, KINDS)
        shape = tuple(getattr(function, "input_shape", ()))
        task = chosen_task(request, tuple(TASKS)) if request.task else None
        classes = 1 if request.task == "binary" else request.num_classes
        collate = getattr(function, "collate_fn", default_collate)
        # Read an example only if one of these facts is missing, because the server may
        # have no site to read from.
        if not shape or not classes or task is None:
            # A site without training has only the part "test".
            parts = _PARTS if request.known_classes else _PARTS[:1]
            of_parts = chain(*(self._sites[part] for part in parts))
            with_examples = [site for site in of_parts if len(site)]
            if not with_examples:
                raise request.problem("no site has a training example.")
            if isinstance(task, OwnTask):
                first = tree_leaves(with_examples[0].pair(0)[0])
                tensors = [tuple(np.shape(leaf)) for leaf in first if np.ndim(leaf)]
                shape, classes = shape or (*tensors, (1,))[0], max(classes, 1)
                return ExampleForm(task, shape, classes, collate)
            inputs, target = with_examples[0].read(0, shape)
            shape = tuple(inputs.shape)
            task = task or self._task_of(target)
            classes = classes or self._count(task, target)
        names = [*getattr(function, "columns", ())]
        if len(shape) == 1 and len(names) not in (0, shape[0]):
            raise request.problem(
                f"columns has {len(names)} names, but an example has {shape[0]} columns."
                " Name each column, or remove the attribute."
            )
        return ExampleForm(task, shape, classes, collate)

    def _task_of(self, target: Tensor) -> Task:
        """Return the task "classification" if a target is a class.

        Raises:
            ConfigError: the target is no class, so the config must set ``task``.
        """
        if target.numel() == 1 and not target.is_floating_point():
            return CLASSIFICATION
        raise ConfigError(
            f"dataset={self._request.name!r}: a target is {target.dtype} of shape"
            f" {tuple(target.shape)}. Set its kind: task=segmentation, regression,"
            " multi-label or binary, or task=module:NAME, an OwnTask of yours."
        )

    def _count(self, task: Task, target: Tensor) -> int:
        """Return the number of classes, or of the numbers in a target.

        Raises:
            ConfigError: targets are classes of pixels, so ``num-classes`` must be set.
        """
        if task.by_pixel:
            raise ConfigError(
                f"dataset={self._request.name!r}: set num-classes, the number of"
                " classes of the pixels or voxels."
            )
        if task.name != "classification":
            return max(target.numel(), 1)
        # Look at the test examples as well, because a site may have a test class
        # without a training example.
        largest = 0
        for site in chain(*self._sites.values()):
            largest = max([largest, *site.labels(0)])
        return largest + 1

    @functools.cached_property
    def info(self) -> DatasetInfo:
        """The description of the data.

        Raises:
            ConfigError: the config must set ``task`` or ``num-classes``, no site is
                known, or there is no such function.
            DataError: the function fails for a site, or its data do not fit the config
                or the other sites.
        """
        names = self._names or tuple(
            f"site-{site}" if isinstance(site, int) else site
            for site in self._request.sites
        )
        form = self._form
        return DatasetInfo(
            self._request.name,
            num_classes=form.classes,
            loader=self.load,
            grouped=True,
            task=form.task,
            input_shape=form.shape,
            client_names=names,
        )

    def load(self, folder: Path, shape: Shape) -> Loaded:
        """Return the training and the test examples of all sites.

        The examples of a ``TensorDataset`` are in memory. Examples of other data sets
        are read at each use, because a data set may augment.
        """
        del folder, shape
        form = self._form
        # Without targets, each example has the class UNKNOWN, whatever the task is.
        if not all(site.labelled for site in self._sites["test"]):
            form = replace(form, task=CLASSIFICATION)
        # Read the first example of every site before any other work, to find sites with
        # another shape or other classes.
        for site in chain(*self._sites.values()):
            if len(site) and isinstance(form.task, OwnTask):
                site.pair(0)
            elif len(site):
                site.example(0, form)
        # Number the groups of training and test together, because a patient may be in
        # both.
        values = [site.groups or () for site in chain(*self._sites.values())]
        units = {value: at for at, value in enumerate(dict.fromkeys(chain(*values)))}
        train, test = (_samples(self._sites[part], form, units) for part in _PARTS)
        return Loaded(train, test, self.info.client_names)

    @property
    def tests(self) -> dict[str, list[int | str]]:
        """No places, because only the function knows the user's files."""
        return {}

    @property
    def sha256(self) -> str:
        """The SHA-256 of the function's file and of its data sets' attributes.

        The attributes are the number of examples, the groups and the classes. Examples
        are not read, so other changes of the examples do not change the digest.

        Raises:
            ConfigError: no site is known, or there is no such function.
            DataError: the function fails for a site, or returns no data set.
        """
        module = own_module("dataset", self._request.path, KINDS)
        digest = hashlib.sha256(sha256_of_code(module).encode())
        for part, sites in self._sites.items():
            for site in sites:
                line = f"{part} {len(site)} {site.groups} {site.classes}\n"
                digest.update(line.encode())
        return digest.hexdigest()


def _samples(
    sites: Sequence[Site], form: ExampleForm, unit_numbers: dict[Any, int]
) -> Samples:
    """Return the examples of one part of all sites.

    Each site is a group of the samples. The ``groups`` of a site (patients) are units.
    """
    # An example without a group is its own unit, numbered after the groups.
    groups, units = list[int](), list[int]()
    for which, site in enumerate(sites):
        first = len(unit_numbers) + len(units)
        if site.groups is None:
            units += range(first, first + len(site))
        else:
            units += [unit_numbers[value] for value in site.groups]
        groups += [which] * len(site)
    read = ReadInputs(sites, form)
    inputs: Tensor | LazyInputs = read
    if isinstance(form.task, OwnTask):
        read = inputs = ReadBatches(sites, form)
    targets: Tensor | None = None
    # Data sets of tensors are in memory anyway and return equal values each time, so
    # read them once.
    in_memory = [
        # A subclass may return other values at each reading.
        site.labelled and type(site.data) is TensorDataset
        for site in sites
    ]
    if read.as_given:
        pass
    elif len(read) and all(in_memory):
        inputs, targets = read.read(range(len(read)))
    # Read the classes now, because splits by class need them. Other targets are read
    # later, with the inputs.
    elif form.task.name in _OF_CLASSES:
        labels = [site.labels(max(form.classes, 2)) for site in sites]
        targets = torch.tensor([*chain(*labels)], dtype=torch.int64)
    return Samples(
        inputs,
        targets,
        torch.tensor(groups, dtype=torch.int64),
        torch.tensor(units) if unit_numbers else None,
    )
