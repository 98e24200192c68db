"""The app, the consoles, the exit codes and the progress bar of all commands."""

from __future__ import annotations

import logging
import math
import os.path
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from inspect import unwrap
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from typer.core import TyperCommand
from typer.models import TyperPath

from fedbn_flwr.errors import (
    ConfigError,
    DataError,
    FedBNError,
    NormLayerError,
)

F = TypeVar("F", bound=Callable[..., Any])
# headings of the groups of commands in --help
BEFORE, TRAIN, AFTERWARDS = "Before a run", "Train", "Afterwards"


class _Command(TyperCommand):
    """A command that shows the help of its arguments and expands ``~`` in paths.

    The shell does not expand ``~`` in ``--out=~/runs`` or within quotes.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # click 8.5 has its own help of arguments and clears the help that Typer 0.20
        # has set. Set the help again.
        hints = get_type_hints(unwrap(options["callback"]), include_extras=True)
        for parameter in self.params:
            (told,) = hints[parameter.name].__metadata__
            parameter.help = told.help

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Return the remaining arguments, after expanding ``~`` in paths."""
        # Expand ``~`` only in arguments that are paths: in another text, ``~`` is an
        # ordinary character.
        rest = super().parse_args(ctx, args)
        for parameter in self.params:
            value = ctx.params.get(parameter.name)
            if not isinstance(parameter.type, TyperPath) or value is None:
                continue
            if parameter.multiple:
                value = tuple(map(os.path.expanduser, value))
            else:
                value = os.path.expanduser(value)
            ctx.params[parameter.name] = value
        return rest


class _App(typer.Typer):
    """A Typer app with groups of commands and an example for each command."""

    def add(
        self, group: str, example: str, name: str | None = None
    ) -> Callable[[F], F]:
        """Return the decorator of a command.

        Args:
            group: the heading of the command in the help.
            example: the text after ``fedbn-flwr``.
            name: the name of the command, if it differs from the function name.
        """
        return self.command(
            name,
            cls=_Command,
            rich_help_panel=group,
            epilog=f"Example: fedbn-flwr {example}",
        )


app = _App(
    help="Batch Normalization in federated learning, on Flower.",
    epilog=(
        "fedbn-flwr run apps/main/recipes/fixbn.yaml --out runs/fixbn\n\nfedbn-flwr"
        " doctor runs/fixbn"
    ),
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
# Texts of users may contain rich's marks for styles and emoji, such as [red] or :ok:.
_PLAIN: Any = {"markup": False, "emoji": False, "highlight": False}
console = Console(**_PLAIN)
complaints = Console(stderr=True, **_PLAIN)
_WIDE = 1000  # largest width of a table in a file or a pipe, in characters


def _version(asked: bool) -> None:
    if asked:
        # Import here, because the import reads the installed packages, and other
        # commands do not need them.
        from fedbn_flwr.messages.versions import as_text, own_versions

        say(as_text(own_versions()))
        raise typer.Exit


@app.callback()
def _of_all_commands(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_version,
            is_eager=True,
            help="Show the version and exit.",
        ),
    ] = False,
) -> None:
    """Print the help of ``app`` if no command is given."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


ConfigFile = Annotated[
    Path | None, typer.Argument(help="YAML file of settings. Default: no file.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="KEY=VALUE that overrides the file; repeatable."),
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Import the modules that the settings of RUN name."),
]
StateFolder = Annotated[
    Path | None, typer.Option(help="State folder of this site; selects its own model.")
]
"""Arguments of several commands."""


def say(text: object = "", style: str | None = None, on: Console = console) -> None:
    """Print a text or a table."""
    # A terminal wraps long lines between words. In a file or a pipe, lines are not
    # wrapped.
    if not on.is_terminal:
        on = Console(file=on.file, width=_WIDE, **_PLAIN)
    on.print(text, style=style, soft_wrap=not on.is_terminal)


def say_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Print a table. A long text is folded over several lines instead of cut."""
    table = Table(*head, box=None, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    for row in rows:
        table.add_row(*row)
    say(table)


@contextmanager
def exit_codes(*bad_input: type[FedBNError]) -> Iterator[None]:
    """Turn errors into exit codes.

    The code is 2 for bad usage, config or data, 130 for Ctrl-C and 143 for SIGTERM, and
    1 for other errors.

    Args:
        bad_input: further errors with code 2.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        text = "interrupted"
        # ``interrupt`` passes a text about the saved files as an argument of the error.
        if any(error.args):
            text = " ".join(["interrupted.", *map(str, error.args)])
        say(text, on=complaints)
        raise typer.Exit(143 if isinstance(error, _Terminated) else 130) from error
    except FedBNError as error:
        # A declared problem has its code in its own line.
        code = "" if error.problems or error.code == type(error).code else error.code
        say(f"{error} [{code}]" if code else error, "red", complaints)
        of_input: tuple[type[FedBNError], ...]
        of_input = (ConfigError, DataError, NormLayerError, *bad_input)
        raise typer.Exit(2 if isinstance(error, of_input) else 1) from error


class _Terminated(KeyboardInterrupt):
    """SIGTERM arrived. Batch systems, systemd and Docker send it before they kill."""


def _terminate(*_: object) -> None:
    raise _Terminated


@contextmanager
def interrupt(what_is_saved: Callable[[], str]) -> Iterator[None]:
    """Let SIGTERM end a command like Ctrl-C, with a text on the saved results."""
    # The handler raises an exception in the main thread, like KeyboardInterrupt, so
    # every ``finally`` runs.
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except KeyboardInterrupt as error:
        raise type(error)(what_is_saved()) from error
    finally:
        signal.signal(signal.SIGTERM, before)


def report_own_data(settings: Any) -> None:
    """Print the counts of own data, if the run has own data on this machine."""
    from fedbn_flwr.lab.config.data import data_of
    from fedbn_flwr.lab.partitioned.counts import data_text
    from fedbn_flwr.lab.partitioned.partitioned_data import (
        count_clients,
        partitioned_data,
    )

    data = data_of(settings)
    if not data.is_own or data.on_nodes:
        return
    split = partitioned_data(settings, count_clients(settings))
    say(data_text(split, settings))


class Scores:
    """The latest training loss and test scores of a run, as text."""

    def __init__(self, score: str) -> None:
        # Shorten the label, because the progress bar is narrow.
        label = "acc" if score == "accuracy" else score
        self._labels = {
            "train-loss": "loss",
            f"test-{score}": label,
            f"personal-own-{score}": f"sites' test {label}",
        }
        self._last: dict[str, str] = {}

    def after(self, line: Any) -> str:
        """Take the values of a line of metrics, and return the latest values as text.

        The text is empty if no line had a value so far.
        """
        for key, label in self._labels.items():
            if line.get(key) is not None:
                self._last[label] = f"{label} {line[key]:.4f}"
        return " ".join(self._last.values())


def bars() -> Progress:
    """Return progress bars with rounds or runs, scores, elapsed and remaining time."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[shown]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=complaints,
        # By default, rich estimates the speed from the last 30 seconds, in which a
        # large model may not finish two rounds. Without a limit, rich uses the last
        # 1000 rounds.
        speed_estimate_period=math.inf,
    )


@contextmanager
def progress(
    total: int, name: str, score: str = "accuracy"
) -> Iterator[Callable[[Any], None]]:
    """Yield the function that shows the progress of a run, given a line of metrics.

    On a terminal it moves a progress bar. Otherwise it prints a line for each round.
    """
    scores = Scores(score)
    # A file or a pipe gets one line per round.
    if not complaints.is_terminal:
        yield lambda line: say(
            f"round {line['round']}/{total}: {scores.after(line)}", on=complaints
        )
        return
    with bars() as shown:
        task = shown.add_task(name, total=total, shown="")
        yield lambda line: shown.update(
            task, completed=line["round"], shown=scores.after(line)
        )


def quiet_flower() -> None:
    """Hide Flower's log of every round, but not its warnings and errors."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
