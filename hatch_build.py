"""Puts the link ``strategies`` into the source archive; hatchling would put a second
copy of the folder there.
"""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class StrategiesLink(BuildHookInterface[Any]):
    """Runs after the source archive is made."""

    def finalize(
        self, version: str, build_data: dict[str, Any], artifact_path: str
    ) -> None:
        """Append the link to the archive."""
        path = Path(artifact_path)
        content = io.BytesIO(gzip.decompress(path.read_bytes()))
        with tarfile.open(fileobj=content, mode="a") as archive:
            first = archive.getmembers()[0]
            link = tarfile.TarInfo(f"{first.name.split('/')[0]}/strategies")
            link.type, link.linkname, link.mtime = (
                tarfile.SYMTYPE,
                "fedbn_flwr/strategies",
                first.mtime,
            )
            archive.addfile(link)
        path.write_bytes(gzip.compress(content.getvalue(), mtime=first.mtime))
