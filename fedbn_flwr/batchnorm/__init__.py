"""The algebra of BatchNorm in a federation: parts of a state, averaging, re-estimation, one BatchNorm over all clients.

Torch and NumPy only.
"""
