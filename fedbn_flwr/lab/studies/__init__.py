"""Studies: grids of runs from a file, done in series or in parallel, with one table.

In reading order:

- ``study``: the file, and the runs of the grid (``Cell``).
- ``check_study``: the checks of a study, and the selection of runs for a sweep.
- ``sweep``: all remaining runs, then the results.
- ``one_run``: the state of one run, and its start or continuation.
- ``parallel``: several runs at a time, each in a process.
- ``tuning``: the settings that a study's trials choose.
- ``results``: tidy rows (one value each), and the table.
"""
