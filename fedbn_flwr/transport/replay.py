"""A synchronised step replayed from recorded answers.

For every message, the step runs again from its beginning, with the same batch and the
same random numbers. Each exchange uses its recorded answer. The first exchange without
an answer stops the step, and the client sends it next. If all exchanges have answers,
the end of the step also stops it, except in the training message. There the training
continues.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedbn_flwr.errors import DataError
from fedbn_flwr.transport.through_user_code import StopStep

__all__ = ["Replay"]

# Relative and absolute tolerance: larger than rounding errors of sums on a GPU, far
# smaller than the difference to another batch.
_SAME = 1e-2, 1e-5


class Replay:
    """A reducer that returns recorded answers.

    Args:
        answers: the recorded answers by tag.
        union_batch_size: number of examples in all clients' batches together.
        sent: the tensors that this client sent before, by tag. Pass them for a user's
            training, because it may not repeat itself exactly.
        step_only: whether the training ends with the step.
    """

    def __init__(
        self,
        answers: Mapping[str, Tensor],
        union_batch_size: int,
        sent: Mapping[str, Tensor] | None = None,
        step_only: bool = False,
    ) -> None:
        self._answers = answers
        self._union = union_batch_size
        self._sent = sent or {}
        self._step_only = step_only

    def begin(self) -> int:
        """See ``Reducer.begin``."""
        return self._union

    def reduce(self, tag: str, tensor: Tensor) -> Tensor:
        """Return the recorded answer.

        Raises:
            StopStep: there is no answer yet.
            DataError: the step did not repeat itself exactly.
        """
        if tag not in self._answers:
            raise StopStep({tag: tensor})
        # With another batch, the answer would be wrong, because it includes the first
        # batch.
        if tag in self._sent and not torch.allclose(
            tensor.cpu(), self._sent[tag], *_SAME
        ):
            raise DataError(
                "the step was run again and sent a different tensor in exchange"
                f" '{tag}'. With messages, the first batch must be the same each time"
                " the training function is called in a round. Draw it from a generator"
                " seeded with the round, or use the channel."
            )
        return self._answers[tag]

    def close(self) -> None:
        """See ``Reducer.close``.

        Raises:
            StopStep: the training ends here.
        """
        # No exchange is left to send. The client reports this, and its next message
        # trains.
        if self._step_only:
            raise StopStep({})
