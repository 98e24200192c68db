"""A client as the server knows it, a value; ``server.runs.nodes`` finds it out."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Node"]


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the run; None for what its app did not say.

    Attributes:
        node_id: Flower's id.
        partition_id: the part of the data that it holds.
        num_examples: number of its training examples.
        batch_size: examples in its first local step.
        unusable: why it cannot take part; "" if it can.
        refusal: why a mod of its app has refused the query; "" if none has.
        behind_mod: whether that mod comes before ``local_bn``, which would have
            answered all the same.
        num_partitions: number of the parts into which the data are split, if it holds
            one of them.
        failure: the error that its app, or a mod of it, raised in answer to the query;
            "" if none.
        packs: whether its app reads arrays in one piece.
    """

    node_id: int
    partition_id: int | None = None
    num_examples: int | None = None
    batch_size: int | None = None
    unusable: str = ""
    refusal: str = ""
    behind_mod: bool = False
    num_partitions: int | None = None
    failure: str = ""
    packs: bool = False

    @property
    def label(self) -> str:
        """The partition id; the node id if the partition id is unknown."""
        return str(self.node_id if self.partition_id is None else self.partition_id)

    @property
    def order(self) -> tuple[bool, int, int]:
        """Sorting key: by partition id, then nodes without one by node id."""
        return self.partition_id is None, self.partition_id or 0, self.node_id

    def __str__(self) -> str:
        """Return the name of the node in messages."""
        if self.partition_id is None:
            return f"node {self.node_id}"
        return f"node {self.node_id} (partition {self.partition_id})"
