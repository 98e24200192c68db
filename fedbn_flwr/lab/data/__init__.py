"""Data sets, their partitions over the clients, and the clients' subsets.

The other modules use these three:

- ``samples``: labelled examples, in memory or read batch by batch; their shape; data
  sets.
- ``subset``: some of these examples, as the normalised batches that a client uses.
- ``augment``: random changes of the images of a training batch.

Data sets by name. To add a data set, write a reader, in a file of this list or in a new
file, and add an entry to ``datasets``:

- ``datasets``: every data set by name, with its description before it is loaded.
- ``loading``: loads a data set in the shape that a model needs, once in a process.
- ``readers``: public data sets in torchvision's files, and the embedded digits.
- ``digits_domains``: the digits in five domains.

Data of a user:

- ``forms``: a folder or a function of the user, ``dataset=KIND:PATH``;
  and image files of any data set.

The split of the examples over the clients. A split is a function of a
``PartitionRequest``: a user's ``partition=module:function``, or an entry of
``partitioning``:

- ``partitioning``: every split by name. It splits the training examples, and then the
  test examples in the same proportions.
- ``splits``, ``group_splits``: the splits by class and by group.
- ``validation``: sets a seeded part of some examples apart.
- ``split_table``: the examples of each class on each client, as a table.

``server.rounds.round`` determines the clients that a round tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedbn_flwr.lab.data.augment import Augment
from fedbn_flwr.lab.data.datasets import DATASETS, DatasetInfo
from fedbn_flwr.lab.data.forms.request import (
    FUNCTION,
    FUNCTION_FORM,
    KINDS,
    OwnData,
    is_own,
    registered,
)
from fedbn_flwr.lab.data.loading import load_dataset
from fedbn_flwr.lab.data.partitioning import (
    PARTITIONS,
    PartitionInfo,
    make_partition,
    partition_counts,
    partition_info,
    partition_test_set,
    split_dataset,
)
from fedbn_flwr.lab.data.samples import Dataset, Samples
from fedbn_flwr.lab.data.split_table import partition_table
from fedbn_flwr.lab.data.splits import PartitionRequest
from fedbn_flwr.lab.data.subset import Subset
from fedbn_flwr.lab.data.validation import split_off
from fedbn_flwr.lazy import imported_when_used

if TYPE_CHECKING:
    from fedbn_flwr.lab.data.forms.door import own_data, own_info
else:
    # Import these functions when they are first used, because their module imports
    # every reader of own data, and most processes have no own data.
    _WHERE = {"own_data": "forms.door", "own_info": "forms.door"}
    __getattr__, __dir__ = imported_when_used(__name__, _WHERE)

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
    "is_own",
    "load_dataset",
    "make_partition",
    "own_data",
    "own_info",
    "partition_counts",
    "partition_info",
    "partition_table",
    "partition_test_set",
    "registered",
    "split_dataset",
    "split_off",
]
