"""Data of a run: data sets held once as bytes, their split over the clients, and the views training and tests read."""

from __future__ import annotations

from fedbn_flwr.data.augment import Augment
from fedbn_flwr.data.datasets import DATASETS, MAX_BYTES, DatasetInfo, load_dataset
from fedbn_flwr.data.own import load_own
from fedbn_flwr.data.partitions import (
    PARTITIONS,
    PartitionInfo,
    PartitionRequest,
    deal_test,
    make_partition,
    partition_counts,
    split_dataset,
)
from fedbn_flwr.data.picture import partition_picture, partition_table
from fedbn_flwr.data.samples import Dataset, Samples, View

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
    "View",
    "deal_test",
    "load_dataset",
    "load_own",
    "make_partition",
    "partition_counts",
    "partition_picture",
    "partition_table",
    "split_dataset",
]
