"""Tell a SuperLink the public keys of its nodes: ``register.py CONNECTION FOLDER``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main(connection: str, folder: str) -> None:
    """Register each ``*.pub`` of the folder by its name."""
    for key in sorted(Path(folder).glob("*.pub")):
        command = ["flwr", "supernode", "register", str(key), connection]
        command += ["--name", key.stem]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        output = (done.stdout + done.stderr).strip()
        # A key that is known stays; Flower's answer has no code for it.
        if done.returncode and "already" not in output:
            sys.exit(f"{key.name} could not be registered: {output}")
        what = "was already registered" if done.returncode else "registered"
        print(f"{key.stem}: {what}")


if __name__ == "__main__":
    main(*sys.argv[1:])
