"""How many examples of each class the clients have, and whether own data are still
those of a run.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fedbn_flwr.errors import DataError, NotResumableError
from fedbn_flwr.lab.config import Config, data_of
from fedbn_flwr.lab.data import is_own, own_sha256, partition_counts, partition_table
from fedbn_flwr.lab.files import read_json
from fedbn_flwr.lab.partitioned.partitioned_data import PartitionedData

__all__ = [
    "client_names",
    "data_counts",
    "data_text",
    "data_warnings",
    "has_other_data",
    "refuse_no_tests",
    "refuse_other_data",
    "sha256_of_data",
]

_MOST = 20  # clients and classes that the text shows


def data_counts(split: PartitionedData) -> dict[str, int]:
    """Return the number of training, validation and test examples."""
    parts = {
        "training": split.train,
        "validation": split.validation,
        "test": split.test,
    }
    return {name: sum(map(len, of_clients)) for name, of_clients in parts.items()}


def data_text(split: PartitionedData, config: Config) -> str:
    """Return the counts of own data by part, client and class as text, several lines."""
    data, names = split.dataset.train, client_names(split)
    parts = ", ".join(
        f"{number:,} {part}" for part, number in data_counts(split).items() if number
    )
    lines = [
        f"{config.dataset}: {data_of(config).task.name}, {parts} examples of shape"
        f" {data.shape}"
    ]
    classes = split.dataset.label_names
    if data.by_class and len(names) <= _MOST and len(classes) <= _MOST:
        counts = partition_counts(split.train, data.labels.cpu().numpy(), len(classes))
        lines += ["training examples by class", partition_table(counts, classes)]
        named = [
            f"client {at} is {name}" for at, name in enumerate(names) if name != str(at)
        ]
        lines += [", ".join(named)] if named else []
    for name, (train, test) in zip(split.held_out_names, split.held_out, strict=True):
        lines.append(
            f"held out: {name}, {len(train):,} inputs, {len(test):,} test examples"
        )
    return "\n".join(lines)


def data_warnings(split: PartitionedData, config: Config) -> list[str]:
    """Return what looks wrong in a split: clients without examples, classes without a
    client.
    """
    warnings = _unused_classes(split)
    if not is_own(config.dataset):
        return warnings
    names = client_names(split)
    for name, part in zip(names, split.train, strict=True):
        if not len(part):
            warnings.append(f"client {name} has no training examples")
        elif len(part) == 1:
            warnings.append(
                f"client {name} has 1 training example: BatchNorm has no variance from"
                " it alone"
            )
    without = [
        name for name, part in zip(names, split.test, strict=True) if not len(part)
    ]
    if without:
        warnings.append(
            f"no test examples: client {', '.join(without[:_MOST])}; no mean counts"
            " their own tests"
        )
    return warnings


def _unused_classes(split: PartitionedData) -> list[str]:
    """Return a line if the split leaves out classes that the data have."""
    train = split.dataset.train
    if not train.by_class:
        return []
    labels, names = train.labels.cpu().numpy(), split.dataset.label_names
    # held-out clients train nothing
    used = np.concatenate([*split.train, *split.validation])
    total, held = (
        np.bincount(some, minlength=len(names)) for some in (labels, labels[used])
    )
    lacking = np.flatnonzero((total > 0) & (held == 0))
    if not len(lacking):
        return []
    shown = ", ".join(names[number] for number in lacking[:5]) + (
        ", ..." if len(lacking) > 5 else ""
    )
    return [
        f"{len(lacking)} of {len(names)} classes have no client ({shown}): their"
        f" {total[lacking].sum()} training examples are not used, and no model learns"
        " them. Use more clients, or a larger classes-per-client."
    ]


def sha256_of_data(config: Config) -> str | None:
    """Return the SHA-256 of own data; None on a machine that has them from another one,
    without the files.
    """
    try:
        return own_sha256(data_of(config).own)
    except DataError:
        return None


def has_other_data(run: Path, config: Config) -> bool:
    """Return whether own data are other examples, or divided in another way, than those
    of the run in a folder.

    False where the folder does not say what they were.
    """
    if not is_own(config.dataset) or data_of(config).on_nodes:
        return False
    before = read_json(run / "data.json").get("sha256")
    now = sha256_of_data(config) if before else None
    return now is not None and now != before


def refuse_other_data(run: Path, config: Config) -> None:
    """Raise NotResumableError if a run would go on with other data: test examples may
    have been trained on.
    """
    if has_other_data(run, config):
        raise NotResumableError(
            f"dataset={config.dataset!r} has changed since the run in {run} began:"
            " other examples, another order or another division into training and test"
            " examples. Restore the data, or start a new run in another folder."
        )


def refuse_no_tests(split: PartitionedData, config: Config) -> None:
    """Raise DataError if own data have no test examples: the run would end without
    results.
    """
    if not is_own(config.dataset) or len(split.dataset.test):
        return
    raise DataError(
        f"dataset={config.dataset!r}: no example is a test example"
        f" (test-share={config.test_share:g}), and a run without them has no results."
        " Use a larger test-share, or data that say which are test examples; a"
        " function returns them for the part 'test'."
    )


def client_names(split: PartitionedData) -> list[str]:
    """Return the name of each client: its group, if it has one group of its own, else
    its number.
    """
    groups, known = split.dataset.train.groups, split.dataset.group_names
    numbers = [str(at) for at in range(len(split.train))]
    if groups is None:
        return numbers
    names = []
    for number, part in zip(numbers, split.train, strict=True):
        of_client = torch.unique(
            groups[torch.as_tensor(part).to(groups.device)]
        ).tolist()
        names.append(known[of_client[0]] if len(of_client) == 1 else number)
    return names if len(set(names)) == len(names) else numbers
