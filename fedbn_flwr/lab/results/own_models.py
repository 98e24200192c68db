"""The tested models of the clients at the end of a run.

With ``fine-tune`` or ``recalibrate``, a client changes its model before its test. At its
end, the run repeats the change once and saves the models in its folder, so that other
commands use the tested models.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator

from flwr.app import Context, RecordDict

from fedbn_flwr.batchnorm.array_types import State
from fedbn_flwr.client.kept import Memory, own_entries, put
from fedbn_flwr.client.torch_client import TorchClient
from fedbn_flwr.lab.config import Config, data_of
from fedbn_flwr.lab.objects_of_config import (
    local_training,
    reuses_models,
    training_model,
)
from fedbn_flwr.lab.partitioned.partitioned_data import PartitionedData
from fedbn_flwr.lab.results.folder import extra
from fedbn_flwr.lab.results.summary import kept_contents
from fedbn_flwr.machine import threads
from fedbn_flwr.messages.protocol import ARRAY_NAMES, HOOKS
from fedbn_flwr.strategies import Strategy


def tested_models(
    config: Config,
    data: PartitionedData | None,
    strategy: Strategy,
    state: State,
    server_round: int,
    again: str,
) -> Iterator[tuple[str, State]]:
    """Yield each client and the entries of its tested model.

    The change has the same seeds, code and data as before the tests of the round. Clients
    are left out if their data or local state are not on this disk.

    Args:
        config: the settings.
        data: the data of the run, or None if they are not on this disk.
        strategy: the strategy after the run.
        state: the global state after the round.
        server_round: the round of the state.
        again: a sentence on how to make a model again if its change fails.
    """
    if data is None:
        return
    kept = dict(kept_contents(config, strategy))
    sent = {**strategy.run.test_config(server_round), **strategy.run.fixed.naming()}
    elsewhere = set[str]()
    # Skip clients whose local state is on other machines, because the steps may need
    # it: gamma and beta of FedBN, for example, are local state.
    if strategy.methods.own_models or HOOKS in sent:
        elsewhere = strategy.run.kept.hashes.keys() - kept
    # As in the run, each client builds its model.
    build = functools.partial(training_model, config)
    for client in range(len(data.train)):
        if str(client) in elsewhere:
            continue
        content = kept.get(str(client))
        entries = {**state, **(own_entries(content) if content else {})}
        context = Context(0, 0, {}, RecordDict(), {})
        message = {**sent, ARRAY_NAMES: json.dumps(list(entries))}
        if content:
            put(Memory(context), content, server_round)
        (named,) = strategy.run.nodes.with_names([str(client)])
        with extra(f"The tested model of client {named}", again):
            trainee = TorchClient(
                build,
                data.train_view(client),
                {},
                local_training(config),
                context=context,
                partition_id=client,
                seed=config.seed,
                task=data_of(config).test_task,
                reuse_model=reuses_models(config),
            )
            with (
                threads(config.torch_threads),
                trainee.tested_model([*entries.values()], message) as tested,
            ):
                own = tested.arrays()
            yield str(client), own
