"""Exit with 0 where an API answers: ``health.py URL [CA]``."""

from __future__ import annotations

import ssl
import sys
import urllib.request


def main(url: str, ca: str | None = None) -> None:
    """Raise unless the API answers within 5 seconds."""
    with urllib.request.urlopen(url, timeout=5, context=ssl.create_default_context(cafile=ca)):
        pass


if __name__ == "__main__":
    main(*sys.argv[1:])
