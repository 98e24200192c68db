"""Commands on a finished run that test its models on data or by site.

- ``saved_model``: the model of a run, global or a client's own; ``load_model``.
- ``evaluate``: a model on any data, with metrics and predictions.
"""
