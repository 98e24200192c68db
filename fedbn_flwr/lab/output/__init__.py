"""The folder of a run, with metrics, predictions, checkpoints, model and summary.

In reading order:

- ``folder``: the files of the folder, written whole or not at all; its lock.
- ``result_writer``: the results of a run, written round by round and at its end.
- ``checkpoint``: the server's checkpoints, when one is written, and the starting point
  of a run.
- ``run_tests``, ``site_tests``: the tests of the run, and the tests of each site.
- ``own_models``: the fine-tuned models of the clients, at the end of a run.
- ``summary``: texts in the files at the end, such as the description of the model.
- ``tests_table``: the table of the tests of each round.
- ``predictions``: the table of single predictions at the end of a run.
- ``intervals``: every mean, difference and interval, from the single predictions.
"""
