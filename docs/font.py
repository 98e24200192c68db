"""Makes the site's mathematics font: ``python docs/font.py STIXMath-Regular.otf``;
needs fonttools and brotli.

The font is that of the STIX Fonts 1.1.1 (Debian's package fonts-stix). Kept are the
characters of formulas and the table MATH, by which a browser sets MathML. Its licence,
the OFL, reserves the name: the subset has another one.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fontTools import subset
from fontTools.ttLib import TTFont

FILE = Path(__file__).parent / "fonts/formulas.woff2"
RANGES = [
    "20-7E",
    "A0-FF",
    "131",
    "237",
    "370-3FF",
    "2000-206F",
    "20D0-20EF",
    "2100-214F",
    "2190-21FF",
    "2200-22FF",
]
RANGES += [
    "2300-23FF",
    "25A0-25FF",
    "27C0-27EF",
    "27F5-27FF",
    "2900-29FF",
    "2A00-2AFF",
    "1D400-1D7FF",
]
NAME = "Formulas"


def main(source: str) -> None:
    """Write the subset."""
    options = subset.Options(
        flavor="woff2",
        layout_features=["*"],
        notdef_outline=True,
        name_IDs=[0, 1, 2, 4, 6, 13, 14],
    )
    font = TTFont(source)
    subsetter = subset.Subsetter(options)
    subsetter.populate(unicodes=[code for one in RANGES for code in _codes(one)])
    subsetter.subset(font)
    for record in font["name"].names:
        if record.nameID in (1, 4, 6):
            record.string = NAME
    if "CFF " in font:
        font["CFF "].cff.fontNames = [NAME]
        top = font["CFF "].cff.topDictIndex[0]
        top.FullName = top.FamilyName = NAME
    FILE.parent.mkdir(exist_ok=True)
    font.flavor = "woff2"
    font.save(FILE)
    print(f"{FILE}: {FILE.stat().st_size:,} bytes, MATH: {'MATH' in font}")


def _codes(one: str) -> range:
    first, _, last = one.partition("-")
    return range(int(first, 16), int(last or first, 16) + 1)


if __name__ == "__main__":
    main(sys.argv[1])
