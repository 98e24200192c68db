"""Commands on a finished run that use its models.

- ``saved_model``: the model of a run, global or a client's own; ``load_model``.
- ``new_data``: data that the run has not seen, for ``evaluate`` and ``calibrate``.
- ``evaluate``: a model on new data, with metrics and predictions.
"""
