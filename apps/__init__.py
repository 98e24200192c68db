"""Flower apps: thin entry points, each with recipes."""
