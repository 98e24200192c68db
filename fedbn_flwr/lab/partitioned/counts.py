"""Reports on a split, and a refusal of a split without tests."""

from __future__ import annotations

import math
import statistics

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.doctor.damage import trained_tests
from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.config import Config, data_of
from fedbn_flwr.lab.data import Samples, is_own, partition_counts, partition_table
from fedbn_flwr.lab.data.forms.request import shown
from fedbn_flwr.lab.data.samples import LazyInputs
from fedbn_flwr.lab.data.splits import Indices
from fedbn_flwr.lab.partitioned.partitioned_data import PartitionedData, sites_of_tests
from fedbn_flwr.messages.site_names import as_list, with_name

# largest number of clients in a text
_MOST = 20
# number of examples of a client whose inputs are compared
_FIRST = 10_000


def data_counts(split: PartitionedData) -> dict[str, int]:
    """Return the number of training, validation and test examples."""
    return {
        "training": sum(map(len, split.train)),
        "validation": sum(map(len, split.validation)),
        # The server also tests on examples that no client has.
        "test": len(split.test_view()),
    }


def usual_steps(config: Config, split: PartitionedData) -> int:
    """Return E, the local steps of the median client in a round."""
    if config.local_steps or not config.batch_size:
        return config.local_steps or config.local_epochs
    batches = [math.ceil(len(part) / config.batch_size) for part in split.train]
    return config.local_epochs * statistics.median_low(batches or [0])


def data_text(split: PartitionedData, config: Config, most: int = _MOST) -> str:
    """Return the counts of the data by part, client and class as text, several lines.

    There is a table by class if there are at most ``most`` clients.
    """
    data, names = split.dataset.train, names_of(split)
    counted = data_counts(split).items()
    parts = ", ".join(f"{number:,} {part}" for part, number in counted if number)
    lines = [
        f"{config.dataset}: {data_of(config).task.name}, {parts} examples of shape"
        f" {data.shape}"
    ]
    # Show the table and the names of the clients, because the table has only their
    # numbers.
    classes = split.dataset.label_names
    if data.by_class and len(split.train) <= most:
        counts = partition_counts(split.train, data.labels.cpu().numpy(), len(classes))
        lines += ["training examples by class", partition_table(counts, classes)]
        if names:
            named = [f"client {client} is {name}" for client, name in names.items()]
            lines.append(", ".join(named))
    for name, (train, test) in zip(split.held_out_names, split.held_out, strict=True):
        lines.append(
            f"held out: {name}, {len(train):,} inputs, {len(test):,} test examples"
        )
    return "\n".join(lines)


def data_warnings(split: PartitionedData, config: Config) -> list[str]:
    """Return the warnings about a split of the data, one text each."""
    warnings = _unused_classes(split)
    # Return here for a registered data set, because its split refuses clients without
    # examples.
    if not is_own(config.dataset):
        return warnings
    warnings += [*_untrained_classes(split), *_trained_tests(split)]
    if data_of(config).split_name == "natural":
        for name, rows in sites_of_tests(split.dataset).items():
            if name not in split.held_out_names and len(rows):
                warnings.append(
                    f"site {name} has {len(rows)} test examples but no training"
                    " example, so no client tests them. To test the site separately in"
                    f" every tested round, set held-out-clients={as_list([name])}"
                )
    without = []
    for name, train, test in zip(
        shown_clients(split), split.train, split.test, strict=True
    ):
        if not len(train):
            warnings.append(f"client {name} has no training examples")
        elif len(train) == 1:
            warnings.append(
                f"client {name} has 1 training example, so BatchNorm gets no variance"
                " from it"
            )
        if not len(test):
            without.append(name)
    if without:
        warnings.append(
            f"no test examples at client {', '.join(without[:_MOST])}. Means over the"
            " clients' own tests leave such clients out"
        )
    return warnings


def _unused_classes(split: PartitionedData) -> list[str]:
    """Return a warning if no client has the training examples of some classes."""
    train = split.dataset.train
    if not train.by_class:
        return []
    labels, names = train.labels.cpu().numpy(), split.dataset.label_names
    # Count the examples of training clients only, because held-out clients do not
    # train.
    used = np.concatenate([*split.train, *split.validation])
    total = np.bincount(labels, minlength=len(names))
    of_clients = np.bincount(labels[used], minlength=len(names))
    lacking = np.flatnonzero((total > 0) & (of_clients == 0))
    if not len(lacking):
        return []
    shown = ", ".join(names[number] for number in lacking[:5])
    if len(lacking) > 5:
        shown += ", ..."
    return [
        f"{len(lacking)} of {len(names)} classes have no client ({shown}): their"
        f" {total[lacking].sum()} training examples are not used, and no model learns"
        " them. Use more clients, or a larger classes-per-client."
    ]


def _untrained_classes(split: PartitionedData) -> list[str]:
    """Return a warning for each part that has classes without a training example.

    The parts are the validation examples and the test examples.
    """
    train, test = split.dataset.train, split.dataset.test
    if not train.by_class:
        return []
    trained = np.unique(train.labels.cpu().numpy()[np.concatenate(split.train)])
    tests = [*split.test, *(rows for _, rows in split.held_out)]
    # Held-out clients, the last names, have no validation examples.
    names = [*shown_clients(split), *split.held_out_names]
    warnings = []
    for part, samples, of_clients in (
        ("validation", train, split.validation),
        ("test", test, tests),
    ):
        # Find the classes of each client for which no client has a training example.
        labels = samples.labels.cpu().numpy()
        found = {
            name: np.setdiff1d(labels[rows], trained)
            for name, rows in zip(names[: len(of_clients)], of_clients, strict=True)
        }
        clients = [name for name, classes in found.items() if len(classes)]
        if clients:
            numbers = np.unique(np.concatenate(list(found.values()))).tolist()
            known = dict(enumerate(split.dataset.label_names))
            classes = [known.get(number, str(number)) for number in numbers]
            warnings.append(
                f"{part} examples of client {shown(clients)} have classes that no"
                f" training example of any client has: {shown(classes)}. No model"
                " learns them. Check that all clients and parts number their classes"
                " alike."
            )
    return warnings


def _trained_tests(split: PartitionedData) -> list[str]:
    """Return a warning if test examples of clients are among the training examples."""
    data = split.dataset
    if isinstance(data.train.source, LazyInputs):  # to read files takes long
        return []
    train = [_inputs(data.train, rows) for rows in split.train]
    tests = [_inputs(data.test, rows) for rows in split.test]
    found = []
    clients = zip(shown_clients(split), tests, trained_tests(train, tests), strict=True)
    for name, test, trained in clients:
        if trained:
            found.append(f"{name} ({trained} of {len(test)})")
    if not found:
        return []
    return [
        f"test examples of client {', '.join(found[:_MOST])} are equal to training"
        " examples, so the tests say nothing about new examples"
    ]


def _inputs(samples: Samples, rows: Indices) -> Tensor:
    """Return the first inputs."""
    return samples.take(torch.as_tensor(rows[:_FIRST], device=samples.device))[0]


def names_of(split: PartitionedData) -> dict[str, str]:
    """Return the clients' names, taken from their groups, by client number.

    A client without a name is left out.
    """
    groups, known = split.dataset.train.groups, split.dataset.group_names
    if groups is None:
        return {}
    names = {}
    for client, part in enumerate(split.train):
        of_client = torch.unique(groups[torch.as_tensor(part).to(groups.device)])
        if len(of_client) == 1:
            names[str(client)] = known[int(of_client)]
    # Use no names if two clients would have the same name, such as two clients of one
    # domain.
    if len({*names.values()}) < len(names):
        return {}
    return {client: name for client, name in names.items() if name != client}


def shown_clients(split: PartitionedData) -> list[str]:
    """Return a text for each client: its number, and its name if it has one."""
    names = names_of(split)
    return [with_name(at, names.get(str(at))) for at in range(len(split.train))]


def refuse_no_tests(split: PartitionedData, config: Config) -> None:
    """Raise DataError if own data have no test examples."""
    if not is_own(config.dataset) or len(split.dataset.test):
        return
    raise DataError(
        f"dataset={config.dataset!r} has no test examples"
        f" (test-share={config.test_share:g}), so a run would have no results."
        " Use a larger test-share, or data with a test part; a"
        " function returns it for the part 'test'."
    )
