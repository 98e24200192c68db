"""Commands on a finished run that test its models on data or by site, or export them.

- ``saved_model``: the model of a run, global or a client's own.
- ``evaluate``: a model on any data, with metrics and predictions.
- ``sites``: the table by site, with intervals and differences between runs.
- ``export``: a model as one file that runs without the run.
"""
