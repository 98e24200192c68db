"""The class-by-client picture of a run."""

from __future__ import annotations

from fedbn_flwr.errors import FedBNError
from fedbn_flwr.lab.partitioned.splitting import count_split, read_split
from fedbn_flwr.lab.report.figures import heatmap
from fedbn_flwr.lab.report.page import Block, Figure, Section, Table, Text
from fedbn_flwr.lab.report.run_files import RunFiles

__all__ = ["split_figures", "split_section"]


def split_section(run: RunFiles) -> Section:
    """Return the class-by-client picture."""
    return Section("split", "Data of the clients", split_figures(run))


def split_figures(run: RunFiles, ending: str = "") -> list[Block]:
    """Return the pictures from ``split.json``, or from the data in a folder of an older version.

    The counts of a protected run are left out: epsilon and masks do not cover them.

    Args:
        run: the run.
        ending: ends the titles.
    """
    if run.config.protected:
        return [Text("The counts of the clients are left out, because the run protects their data.", "note")]
    try:
        saved = run.json("split.json")
        clients, tables = read_split(saved) if saved else ([], count_split(run.config))
    except (FedBNError, OSError) as error:
        text = f"The folder has no split.json, and the data cannot be read here: {error}"
        return [Text(text, "note")]
    blocks: list[Block] = []
    for table in tables:
        names, kinds = list(clients or map(str, range(len(table.counts)))), list(map(str, table.names))
        sizes, held = table.counts.sum(1), (table.counts > 0).sum(1)
        rows = [[name, *map(str, row), str(sum(row))] for name, row in zip(names, table.counts.tolist(), strict=True)]
        title = f"{table.of.capitalize()} examples by {table.what} and client{ending}"
        label = (
            f"{title}: {len(names)} clients have {sizes.min()} to {sizes.max()} examples each, of {held.min()} to "
            f"{held.max()} of {len(kinds)} kinds."
        )
        drawing = heatmap(table.counts.T.tolist(), names, kinds, titles=("client", table.what, "examples"))
        blocks.append(Figure(drawing, label, title, Table(["client", *kinds, "all"], rows)))
    return blocks
