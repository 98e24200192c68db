"""The arithmetic of federated BatchNorm, in Torch and NumPy only.

In reading order:

- ``parts``: the split of a model's state: affine, statistics, counters, the rest, and
  personal entries; the entries that share a tensor. ``fixed_entries``: entries that
  local training does not change. ``train_only``: the words that say what trains.
  ``layers``: the layers that a method acts on.
- ``array_types``: the types of the arrays of a state.
- ``averaging``: refuses a state with wrong shapes, values that are not finite, or
  negative variances, before it is averaged; and the average of clients' states.
- ``reestimation``: statistics from data, of a batch and of a pass ("precise BN").
- ``layer_inputs``: reads the inputs of layers in passes through a copy.
- ``adaptation``: test-time BatchNorm, with statistics of the test inputs.
- ``calibration``: statistics for a site that did not train, and a judgement of the
  model there. ``site_passes``: its passes over the inputs. ``class_moments``: the
  moments of each class at the training sites.
- ``sync``: BatchNorm over the batches of all clients of a round, as in FedTAN.
"""
