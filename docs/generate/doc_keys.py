"""The table of the config keys that are made from declarations of methods."""

from __future__ import annotations

import re
from pathlib import Path

from doc_problems import PACKAGE, problem_rows

from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.config.fields import PARAMS, SettingsOfMethods, config_fields
from fedbn_flwr.privacy.protection_settings import DPSettings
from fedbn_flwr.server.methods.params import Settings

__all__ = ["KEYS", "key_table"]

KEYS = Path("fedbn_flwr/lab/config/generated_keys.md")
_READ = re.compile(r"\b(?:params|p|own|config|_config|settings|dp)\.(?=(\w+))")
"""The reading of a setting, by the names of variables and attributes with settings."""
_HEAD = """<!-- Made by `make generate`. Do not edit. -->

`SettingsOfMethods` in `fields.py` makes these fields of `Config` from the declarations
of methods and protections. `docs/config.md` has their meanings.

| key | field | declared in | refused or warned of in | used in |
|---|---|---|---|---|
"""


def key_table() -> str:
    """Return the text of ``KEYS``: where each generated key is declared, checked, used."""
    sources = {
        path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    checks = problem_rows()
    # Other objects have attributes of the same names.
    read = {file: {*_READ.findall(text)} for file, text in sources.items()}
    lines = []
    for field in SettingsOfMethods.model_fields:
        declared = _declarations(field)
        settings = {field, *declared.values()}
        checked = {row.file for row in checks if settings & {*row.keys.split()}}
        used = {file for file, names in read.items() if settings & names}
        for place in declared:
            file = place.partition(" ")[0]
            if re.search(rf"\bself\.{declared[place]}\b", sources[file]):
                used.add(file)
        cells = [
            f"`{Config.model_fields[field].alias}`",
            f"`{field}`",
            *(", ".join(sorted(names)) for names in (declared, checked, used)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return _HEAD + "\n".join(lines) + "\n"


def _declarations(field: str) -> dict[str, str]:
    """Return the name of the setting of a config's field by the file that declares it."""
    found = {}
    kinds: list[type[Settings]] = [*PARAMS.values(), DPSettings]
    for kind in kinds:
        setting = config_fields(kind).get(field, field)
        for owner in kind.__mro__:
            if setting in vars(owner).get("__annotations__", {}):
                file = f"{owner.__module__.partition('.')[2].replace('.', '/')}.py"
                found[f"{file} `{owner.__name__}`"] = setting
    return found
