"""The folder of a run: metrics, curves, checkpoints, model and summary."""
