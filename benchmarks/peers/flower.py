"""Stock Flower: a plain ClientApp and Flower's own FedAvg, in its Ray simulation.

Written as in Flower's quickstart with PyTorch. With FedBN a client keeps its BN entries
in ``Context.state`` and sends the others.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from peers.bare import indexed, train
from peers.flower_rounds import ray_backend, strategy_arguments, timed
from peers.work import Clock, Job, accuracy, contend, load_data, local_names, make_model
from torch import nn


def received_model(
    message: Message, context: Context, job: Job
) -> tuple[nn.Module, set[str]]:
    """Return the model with the received state and the client's own, and the names that
    stay here.
    """
    torch.set_num_threads(1)
    model = make_model(job.work.model)
    own = local_names(model) if job.work.personal else set()
    sent = message.content["arrays"].to_torch_state_dict()  # type: ignore[union-attr]
    model.load_state_dict(sent, strict=not own)
    if "own" in context.state:
        model.load_state_dict(context.state["own"].to_torch_state_dict(), strict=False)  # type: ignore[union-attr]
    return model, own


def make_client_app(job: Job) -> ClientApp:
    """Return the clients of a job."""
    app = ClientApp()

    @app.train()
    def train_message(message: Message, context: Context) -> Message:
        model, own = received_model(message, context, job)
        client = int(context.node_config["partition-id"])
        inputs, targets = load_data(job.data, job.work.dataset).client(
            client, job.work.examples
        )
        train(model, indexed(inputs, targets, job.work), job.work)
        state = model.state_dict()
        if own:
            context.state["own"] = ArrayRecord(
                {name: state.pop(name) for name in sorted(own)}
            )
        reply = RecordDict({"arrays": ArrayRecord(state)})
        reply["metrics"] = MetricRecord({"num-examples": len(targets)})
        return Message(reply, reply_to=message)

    @app.evaluate()
    def evaluate_message(message: Message, context: Context) -> Message:
        model, _ = received_model(message, context, job)
        found = accuracy(model, load_data(job.data, job.work.dataset))
        return Message(
            RecordDict(
                {"metrics": MetricRecord({"accuracy": found, "num-examples": 1})}
            ),
            reply_to=message,
        )

    return app


class Checked(FedAvg):
    """Flower's strategy, but a failed client ends the run."""

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        replies = list(replies)
        if failed := [reply.error for reply in replies if reply.has_error()]:
            raise RuntimeError(
                f"{len(failed)} of {len(replies)} clients failed: {failed[0]}"
            )
        return super().aggregate_train(server_round, replies)


def main(job: Job, clock: Clock) -> float:
    """Do the rounds and the last one's evaluation."""
    setting = job.work
    model = make_model(setting.model)
    own = local_names(model) if setting.personal else set()
    initial = ArrayRecord(
        {name: entry for name, entry in model.state_dict().items() if name not in own}
    )
    results: list[Any] = []
    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = timed(Checked, clock, setting)(**strategy_arguments(setting))
        results.append(strategy.start(grid, initial, num_rounds=job.rounds + 1))

    run_simulation(
        server,
        make_client_app(job),
        setting.clients,
        backend_config=ray_backend(job.workers),
    )
    if setting.personal:
        return float(results[0].evaluate_metrics_clientapp[job.rounds + 1]["accuracy"])
    model.load_state_dict(results[0].arrays.to_torch_state_dict())
    return accuracy(model, load_data(job.data, setting.dataset))


if __name__ == "__main__":
    from peers import flower

    logging.getLogger("flwr").setLevel(logging.ERROR)
    contend(flower.main, "flwr")
