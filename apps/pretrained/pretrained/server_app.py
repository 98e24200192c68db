"""The ServerApp: a pretrained network, and any strategy by name."""

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedbn_flwr import split_state
from fedbn_flwr.strategies import STRATEGIES
from pretrained.task import pretrained

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context):
    """Run the rounds; print the accuracy at the scanners and the bytes sent."""
    config = context.run_config
    model = pretrained(config["seed"])
    strategy = STRATEGIES[config["strategy"]](
        parts=split_state(model), train_only=config["train-only"], seed=config["seed"]
    )
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        train_config=ConfigRecord({"lr": config["learning-rate"]}),
        num_rounds=config["num-server-rounds"],
    )
    for report in strategy.reports:
        metrics = result.evaluate_metrics_clientapp[report.server_round]
        print(
            f"round {report.server_round}: accuracy {metrics['eval_acc']:.4f},"
            f" {report.train.down} bytes of floats sent"
        )
