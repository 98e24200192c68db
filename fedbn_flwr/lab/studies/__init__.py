"""Studies: grids of runs from a file, done in series or in parallel, with one table.

In reading order:

- ``study``: the file, and the runs of the grid (``Cell``).
- ``check_study``: the refusals of a study, and the part that a sweep does now.
- ``sweep``: all remaining runs, then the results.
- ``one_run``: the state of a run, and doing it from the start or its checkpoint.
- ``parallel``: several runs at a time, each in a process.
- ``tuning``: the settings that a study's trials choose.
- ``results``: tidy rows, and the table.
"""
