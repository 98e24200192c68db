"""Exit with 0 if every API answers: ``health.py CA URL...``."""

from __future__ import annotations

import ssl
import sys
import urllib.request


def main(ca: str, *urls: str) -> None:
    """Raise unless each API answers in 4 seconds, with a certificate of the CA."""
    context = ssl.create_default_context(cafile=ca)
    for url in urls:
        with urllib.request.urlopen(url, timeout=4, context=context):
            pass


if __name__ == "__main__":
    main(*sys.argv[1:])
