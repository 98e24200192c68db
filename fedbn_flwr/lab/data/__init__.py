"""Data of a run: data sets, kept once as bytes, their partitions over the clients, and
the subsets that clients use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedbn_flwr.lab.data.augment import Augment
from fedbn_flwr.lab.data.dataset import Dataset
from fedbn_flwr.lab.data.loading import DATASETS, DatasetInfo, load_dataset
from fedbn_flwr.lab.data.local_dataset import load_local_dataset
from fedbn_flwr.lab.data.names import listed
from fedbn_flwr.lab.data.own import FUNCTION, FUNCTION_FORM, KINDS, OwnData, is_own
from fedbn_flwr.lab.data.partitioning import (
    PARTITIONS,
    PartitionInfo,
    PartitionRequest,
    make_partition,
    partition_counts,
    partition_test_set,
    split_dataset,
)
from fedbn_flwr.lab.data.picture import partition_picture, partition_table
from fedbn_flwr.lab.data.samples import Samples
from fedbn_flwr.lab.data.subset import Subset
from fedbn_flwr.lab.data.validation import split_off
from fedbn_flwr.lazy import imported_when_used

if TYPE_CHECKING:
    from fedbn_flwr.lab.data.own import is_divided, own_info, own_sha256, own_tests
else:
    _OF_OWN = ("is_divided", "own_info", "own_sha256", "own_tests")
    __getattr__, __dir__ = imported_when_used(__name__, dict.fromkeys(_OF_OWN, "own"))

__all__ = [
    "DATASETS",
    "FUNCTION",
    "FUNCTION_FORM",
    "KINDS",
    "PARTITIONS",
    "Augment",
    "Dataset",
    "DatasetInfo",
    "OwnData",
    "PartitionInfo",
    "PartitionRequest",
    "Samples",
    "Subset",
    "is_divided",
    "is_own",
    "listed",
    "load_dataset",
    "load_local_dataset",
    "make_partition",
    "own_info",
    "own_sha256",
    "own_tests",
    "partition_counts",
    "partition_picture",
    "partition_table",
    "partition_test_set",
    "split_dataset",
    "split_off",
]
