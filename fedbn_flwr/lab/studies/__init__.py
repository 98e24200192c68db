"""Studies: grids of runs from a file, done in series or in parallel, with one table.

In reading order:

- ``study``: the file, and the runs of the grid (``Cell``).
- ``check_study``: the checks of a study, and the selection of runs for a sweep.
- ``sweep``: the loop over the runs: their order, and which are skipped and resumed.
- ``one_run``: the state of one run, and its start or continuation.
- ``parallel``: several runs at a time, each in a process.
- ``tuning``: reads the study of the trials, and chooses settings.
- ``tables``: tidy rows (one value each), and the table.
"""
