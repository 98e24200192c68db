"""The class-by-client picture of a run."""

from __future__ import annotations

from collections.abc import Sequence

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
        names = [*(clients or map(str, range(len(table.counts))))]
        what, title = table.what, f"{table.of.capitalize()} examples by {table.what} and client{ending}"
        numbers = Table(
            ["client", *map(str, table.names), "all"],
            [[name, *map(str, row), str(sum(row))] for name, row in zip(names, table.counts.tolist(), strict=True)],
        )
        drawing = heatmap(
            table.counts.T.tolist(), names, [str(name) for name in table.names], titles=("client", what, "examples")
        )
        label = f"{title}: {_missing(table.counts.tolist(), names)}"
        blocks.append(Figure(drawing, label, title, numbers))
    return blocks


def _missing(counts: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    sizes = [sum(row) for row in counts]
    held = [sum(number > 0 for number in row) for row in counts]
    return (
        f"{len(names)} clients have {min(sizes)} to {max(sizes)} examples each, of {min(held)} to {max(held)} of "
        f"{len(counts[0])} kinds."
    )
