"""The laboratory: what runs experiments with the methods. It may import anything; the package never imports it.

- ``config``: the settings of a run and what is refused. ``setup.py``: its model, local training and strategy.
- ``data`` with ``models`` and ``export``: data sets, networks, and files of models to take away.
- ``partitioned``: the data of a run, its split over the clients and the report on it.
- ``output``: the folder of a run: metrics, curves, checkpoints, model, summary. ``early_stopping.py`` ends a run.
- ``runs``: a run in each engine, the checks before it, its server and its clients, and the default Flower app.
- ``finished_runs``: evaluate and export the model of a run.
- ``studies``: grids of runs, their results and tables. ``report``: the HTML page of a run or a study.
- ``doctor.py``: what went wrong with BatchNorm in a run.
- ``deployment``: a federation over a network. ``cli``: the command line.
"""
