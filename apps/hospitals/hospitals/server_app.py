"""The ServerApp: any strategy by name."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedbn_flwr import split_state
from fedbn_flwr.strategies import STRATEGIES
from hospitals.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context):
    """Run the rounds; print how the hospitals do on their own patients."""
    config = context.run_config
    torch.manual_seed(config["seed"])
    model = Net()
    strategy = STRATEGIES[config["strategy"]](
        parts=split_state(model), seed=config["seed"]
    )
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        train_config=ConfigRecord({"lr": config["learning-rate"]}),
        num_rounds=config["num-server-rounds"],
    )
    for server_round, metrics in result.evaluate_metrics_clientapp.items():
        print(f"round {server_round}: accuracy {metrics['eval_acc']:.4f}")
