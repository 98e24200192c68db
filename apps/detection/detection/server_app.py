"""The ServerApp: any strategy by name."""

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from detection.task import detector
from fedbn_flwr import split_state
from fedbn_flwr.strategies import STRATEGIES

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context):
    """Run the rounds; print the mean average precision of the sites' own images."""
    config = context.run_config
    torch.manual_seed(config["seed"])
    model = detector()
    strategy = STRATEGIES[config["strategy"]](
        parts=split_state(model),
        seed=config["seed"],
        train_only=config["train-only"],
    )
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        num_rounds=config["num-server-rounds"],
    )
    for server_round, metrics in result.evaluate_metrics_clientapp.items():
        print(f"round {server_round}: mean average precision {metrics['map']:.4f}")
