"""Data of a run: data sets, kept once as bytes, their partitions over the clients, and the subsets that clients use."""

from __future__ import annotations

from fedbn_flwr.data.augment import Augment
from fedbn_flwr.data.loading import DATASETS, MAX_BYTES, DatasetInfo, load_dataset
from fedbn_flwr.data.local_dataset import load_local_dataset
from fedbn_flwr.data.partitioning import (
    PARTITIONS,
    PartitionInfo,
    PartitionRequest,
    make_partition,
    partition_counts,
    partition_test_set,
    split_dataset,
)
from fedbn_flwr.data.picture import partition_picture, partition_table
from fedbn_flwr.data.samples import Dataset, Samples, Subset
from fedbn_flwr.data.validation import split_off

__all__ = [
    "DATASETS",
    "MAX_BYTES",
    "PARTITIONS",
    "Augment",
    "Dataset",
    "DatasetInfo",
    "PartitionInfo",
    "PartitionRequest",
    "Samples",
    "Subset",
    "load_dataset",
    "load_local_dataset",
    "make_partition",
    "partition_counts",
    "partition_picture",
    "partition_table",
    "partition_test_set",
    "split_dataset",
    "split_off",
]
