"""Own data: ``dataset=folder:PATH``, ``npz:PATH`` or ``module:function``.

- ``request``: what the config says of them: kind, path, task. A new kind starts there.
- ``records``: what a reader of files finds.
- ``folder``, ``arrays``: the readers of folders of images and of npz files.
- ``reading``: their records, divided into training and test examples, with a SHA-256.
- ``function``: the data that a user's function returns; ``read_inputs`` reads them
  example by example.
- ``description``: what a model must know of own data of each kind.

The readers are imported when own data are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedbn_flwr.lab.data.own.request import (
    FUNCTION,
    FUNCTION_FORM,
    KINDS,
    OwnData,
    is_own,
)
from fedbn_flwr.lazy import imported_when_used

if TYPE_CHECKING:
    from fedbn_flwr.lab.data.own.description import own_info
    from fedbn_flwr.lab.data.own.reading import is_divided, own_sha256, own_tests
else:
    _WHERE = {
        "is_divided": "reading",
        "own_info": "description",
        "own_sha256": "reading",
        "own_tests": "reading",
    }
    __getattr__, __dir__ = imported_when_used(__name__, _WHERE)

__all__ = [
    "FUNCTION",
    "FUNCTION_FORM",
    "KINDS",
    "OwnData",
    "is_divided",
    "is_own",
    "own_info",
    "own_sha256",
    "own_tests",
]
