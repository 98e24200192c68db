"""The arithmetic of federated BatchNorm: parts of a state, averaging, re-estimation,
one BatchNorm over all clients.

Torch and NumPy only.
"""
