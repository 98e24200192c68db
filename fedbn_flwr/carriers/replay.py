"""The step replayed from recorded answers: no state between messages but what was answered so far.

Each time the step is run again from its beginning, with the same batch and the same random numbers; exchanges that
were answered take their answer, and the first one that was not ends the run.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fedbn_flwr.errors import FedBNError

__all__ = ["Pending", "Replay"]


class Pending(FedBNError):
    """The step has come to an exchange without an answer.

    Attributes:
        tag: the exchange.
        tensor: what this client sends.
    """

    def __init__(self, tag: str, tensor: Tensor) -> None:
        super().__init__(f"exchange '{tag}' waits for its answer")
        self.tag = tag
        self.tensor = tensor


class Replay:
    """A seat that answers from a record.

    Args:
        answers: by tag.
        union_batch_size: examples in the union of all clients' batches.
    """

    def __init__(self, answers: Mapping[str, Tensor], union_batch_size: int) -> None:
        self._answers = answers
        self._union = union_batch_size

    def begin(self) -> int:
        """See ``Seat.begin``."""
        return self._union

    def reduce(self, tag: str, tensor: Tensor) -> Tensor:
        """Return the recorded answer.

        Raises:
            Pending: there is none yet.
        """
        if tag not in self._answers:
            raise Pending(tag, tensor)
        return self._answers[tag]

    def close(self) -> None:
        """See ``Seat.close``."""
