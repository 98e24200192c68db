"""The adapter to those internals of Flower that may change."""
