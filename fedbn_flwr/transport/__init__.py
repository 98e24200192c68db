"""The exchanges of a synchronised step between the clients of a round.

``transports`` has the mapping ``TRANSPORTS``. A new transport is a new file here and a
line in this mapping. A client calls ``reduce(tag, tensor)`` of a ``Reducer``. The
answer comes from a barrier in this process, over gRPC, or from a log of earlier
answers. In reading order:

- ``turns``: which client of a process computes, and how a client waits for others.
- ``through_user_code``: ``Reducer``, and its way past a user's training code.
- ``transports``: the transports by name, and a client's choice of its reducer.
- ``hook_context``: the input of a client for making the hooks of a method.
- ``step_transport``: the shared ``Transport``, limits, and a step's result.
- ``barrier``: collects a tensor from each client and answers all clients.
- ``step_by_barrier``: a step whose clients meet at the barrier, such as in one process.
- ``step_by_channel``: the transport "channel", a step whose clients reach the barrier
  by gRPC. ``channel_frame`` encodes a call and its reply as bytes, ``channel_server``
  opens the port, and ``grpc_channel`` is the client's end.
- ``step_by_messages``: the transport "messages", a step by Flower's messages.
  ``client.replay_log`` runs the client's step again with the answers so far.
- ``polling_grid``: messages through Flower's Grid without its pauses.

The way of one mean of FedTAN, with a barrier in this process:

1. Server: ``train_synchronised`` (``server.rounds``) finds the members, and
   ``step_by_barrier`` opens a barrier at the grid and sends the messages.
2. Engine: ``engines.client_work`` leaves the member's reducer in a context variable
   (``use_reducer``), and calls the app.
3. Client: ``reducer_of`` (``client.replay_log``) takes it, and ``HookContext`` gives it
   to ``SynchroniseFirstStep`` (``strategies.fedtan``). ``around`` opens the block
   ``synchronised`` (``batchnorm.sync``) for the first step.
4. In the forward pass, ``sync.mode`` replaces the call of a layer, ``sync.layer``
   computes the client's mean, and ``Barrier.reduce`` waits for the others in
   ``turns.Wait``.
5. The last member's call combines the means (``sync.reduction.combine``), and each
   member's layer goes on with the answer.

By messages, step 4 leaves the training with ``StopStep``, and ``TorchClient.fit`` replies
with the mean. The next message has the answer: ``log_answer`` adds it to the log, and
step 3 begins again with a ``Replay`` as reducer.
"""

from __future__ import annotations

from fedbn_flwr.transport.barrier import Barrier, BarrierGrid, Member
from fedbn_flwr.transport.through_user_code import (
    Dropped,
    Reducer,
    RetryStep,
    StopStep,
    in_process_reducer,
    use_reducer,
)

__all__ = [
    "Barrier",
    "BarrierGrid",
    "Dropped",
    "Member",
    "Reducer",
    "RetryStep",
    "StopStep",
    "in_process_reducer",
    "use_reducer",
]
