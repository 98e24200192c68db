"""A project of Flower's older kind, with its own model, data and training loop."""
