"""A PyTorch project on Flower."""
