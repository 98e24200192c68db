"""The folder of a run: metrics, curves, checkpoints, model and summary.

In reading order:

- ``folder``: the files of the folder, written whole or not at all; its lock.
- ``result_writer``: what a run writes, round by round and at its end.
- ``checkpoint``: the server's checkpoints, and where a run starts.
- ``run_tests``, ``site_tests``: the tests of the run, and those of each site.
- ``summary``: what the last files say besides numbers, also of the model.
- ``statistics_log``, ``curves``, ``tensorboard_log``: a file each.
"""
