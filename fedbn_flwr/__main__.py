"""The command ``fedbn-flwr``.

Without the extra ``lab``, it prints the command for installing the extra.
"""

from __future__ import annotations

import sys

from fedbn_flwr.errors import MissingExtraError
from fedbn_flwr.machine import keep_freed_memory


def main() -> None:
    """Run the command line.

    Raises:
        SystemExit: always, with the exit code, or 2 if the extra is absent.
    """
    keep_freed_memory()
    try:
        from fedbn_flwr.lab.cli import app
    except MissingExtraError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    app()


if __name__ == "__main__":
    main()
