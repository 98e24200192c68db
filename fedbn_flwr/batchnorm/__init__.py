"""The arithmetic of federated BatchNorm, in Torch and NumPy only.

In reading order:

- ``parts``: a state by layer type: affine, statistics, counters and the rest.
- ``averaging``: the average of clients' states. ``check_state`` refuses a state with
  wrong shapes, values that are not finite, or negative variances.
- ``reestimation``: statistics from data, of a batch and of a pass ("precise BN").
- ``replaced_forward``: a method's forward pass in place of a layer's; normalisation.
- ``adaptation``: test-time BatchNorm, with statistics of the test inputs.
- ``sync``: one BatchNorm over all clients of a round, FedTAN's first step.
- ``outer_affine``: gamma and beta that a layer's owner applies, for ``parts``.
"""
