"""The folder of a run: what a run writes into it, and everything that reads it.

A run writes, in reading order:

- ``files``: the names of the files, and readers of the simple ones.
- ``folder``: the files of the folder, written whole or not at all; its lock.
- ``result_writer``: the results of a run, written round by round and at its end.
- ``checkpoint``: the server's checkpoints, when one is written, and the starting point
  of a run. ``same_data`` refuses a resume with other data.
- ``tester``: the server's tests, after each round and of every site at the end.
- ``own_models``: the fine-tuned models of the clients, at the end of a run.
- ``summary``: texts in the files at the end, such as the description of the model.
- ``tests_table``: the table of the tests of each round.
- ``predictions``: the table of single predictions at the end of a run.

Others read:

- ``run_files``: the contents of a run's folder, for the report and the doctor.
- ``intervals``: numbers with intervals, from the single predictions.
- ``sites``: the sites of a run, and which of them count in its mean.
- ``ranking``: the methods of a study: which runs, seeds and sites count.
- ``saved_model``: the model of a run, global or a client's own; ``load_model``.
- ``new_data``: data that the run has not seen, for ``evaluate`` and ``calibrate``.
- ``evaluate``: a model on new data, with metrics and predictions.
- ``columns``: facts about the columns of a table, and how a new table differs.
- ``label_verdict``: the verdict on a model from labels of a new site.
"""
