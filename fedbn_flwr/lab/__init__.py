"""The laboratory for experiments with the methods.

The laboratory may import every module of the package. The rest of the package never
imports the laboratory.

- ``config``: the settings of a run, and the checks of settings.
  ``objects_of_config.py`` makes the model, the local training and the strategy of them.
- ``data`` with ``models``: data sets and networks.
- ``partitioned``: the data of a run, its split over the clients and the report on it.
- ``results``: the folder of a run: what is written into it, and everything that reads
  it. ``early_stopping.py`` ends a run.
- ``runs``: a run in each engine, the checks before it, its server and its clients, and
  the default Flower app.
- ``studies``: grids of runs, their results and tables.
- ``report``: the HTML page of a run or a study.
- ``diagnose_run.py``: the core's ``doctor`` for the folder of a run. ``new_site.py``:
  a run's model, calibrated at a new site.
- ``own_code.py``: functions and modules of a user. ``cli``: the command line.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from fedbn_flwr.errors import MissingExtraError, install_extra

__all__: list[str] = []

_NEEDS = (
    "PIL",
    "flwr_datasets",
    "jinja2",
    "matplotlib",
    "pandas",
    "ray",
    "rich",
    "scipy",
    "sklearn",
    "torchvision",
    "typer",
    "yaml",
)
"""The packages of the extra ``lab``, by the names of modules."""


class _Door:
    """Import finder that refuses the laboratory if only the core is installed."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        """Refuse the import, with the command that installs the absent packages.

        Raises:
            MissingExtraError: a package of the extra ``lab`` is absent.
        """
        if name.startswith(f"{__name__}."):
            raise MissingExtraError(
                "the command line, data sets and studies of fedbn-flwr need packages"
                f" that are not installed ({', '.join(_ABSENT)}): {install_extra('lab')}"
            )


if _ABSENT := [name for name in _NEEDS if find_spec(name) is None]:
    sys.meta_path.insert(0, _Door)
