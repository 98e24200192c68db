"""What the commands share: the app, the consoles, exit codes and the progress bar."""

from __future__ import annotations

import logging
import math
import os.path
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import unwrap
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

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
from typer.core import TyperCommand
from typer.models import TyperPath

from fedbn_flwr.errors import ConfigError, DataError, FedBNError, NormLayerError

__all__ = [
    "AFTERWARDS",
    "BEFORE",
    "TRAIN",
    "ConfigFile",
    "EngineChoice",
    "Overrides",
    "Scores",
    "StateFolder",
    "app",
    "bars",
    "complaints",
    "console",
    "exit_codes",
    "interrupt",
    "progress",
    "quiet_flower",
    "report_own_data",
    "say",
]

F = TypeVar("F", bound=Callable[..., Any])
# groups of commands in the help
BEFORE, TRAIN, AFTERWARDS = "Before a run", "Train", "Afterwards"


class _Command(TyperCommand):
    """A command that shows the help of its arguments, and reads ``~`` at the begin of a
    path where no shell has: ``--out=~/runs``, or within quotes.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # click 8.5 gives arguments a help, and by that empties Typer 0.20's.
        hints = get_type_hints(unwrap(options["callback"]), include_extras=True)
        for parameter in self.params:
            (told,) = hints[parameter.name].__metadata__
            parameter.help = told.help

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, with the user's home for ``~`` in paths."""
        # paths alone: "~" in another text means itself
        rest = super().parse_args(ctx, args)
        for parameter in self.params:
            value = ctx.params.get(parameter.name)
            if isinstance(parameter.type, TyperPath) and value is not None:
                ctx.params[parameter.name] = os.path.expanduser(value)
        return rest


class _App(typer.Typer):
    """Typer whose commands are of this kind, in groups, each with an example."""

    def add(
        self, group: str, example: str, name: str | None = None
    ) -> Callable[[F], F]:
        """Return the decorator of a command.

        Args:
            group: its heading in the help.
            example: what stands behind ``fedbn-flwr``.
            name: the command, where it is not that of the function.
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
console = Console(markup=False, highlight=False)
complaints = Console(stderr=True, markup=False, highlight=False)
_WIDE = 1000  # characters of a table in a file or a pipe, at most


def _version(asked: bool) -> None:
    if asked:
        # It asks the installed packages, which other commands need not.
        from fedbn_flwr.messages.versions import as_text, own_versions

        say(as_text(own_versions()))
        raise typer.Exit


@app.callback()
def _of_all_commands(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show it."),
    ] = False,
) -> None:
    """See the help of ``app``, which the command alone prints."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


ConfigFile = Annotated[
    Path | None, typer.Argument(help="YAML file of settings; without it, the defaults.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="key=value, replaces the file's; repeatable."),
]
StateFolder = Annotated[
    Path | None, typer.Option(help="State folder of this site: its own model.")
]
"""Arguments of several commands."""

EngineChoice = Literal["in-process", "simulation"]
"""Where the clients run: ``runs.run.Engine``, without its import."""


def say(text: object = "", style: str | None = None, on: Console = console) -> None:
    """Print a text or a table."""
    # Lines of a file or a pipe stay whole; in a terminal they break between words.
    if not on.is_terminal:
        on = Console(file=on.file, width=_WIDE, markup=False, highlight=False)
    on.print(text, style=style, soft_wrap=not on.is_terminal)


@contextmanager
def exit_codes(*bad_input: type[FedBNError]) -> Iterator[None]:
    """Turn errors into exit codes: 2 for bad usage, config or data, else 1.

    130 is for Ctrl-C and 143 for SIGTERM, as a shell has it.

    Args:
        bad_input: further errors with code 2.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        text = "interrupted"
        # what is saved, see ``interrupt``
        if any(error.args):
            text = " ".join(["interrupted.", *map(str, error.args)])
        say(text, on=complaints)
        raise typer.Exit(143 if isinstance(error, _Terminated) else 130) from error
    except FedBNError as error:
        say(error, "red", complaints)
        of_input: tuple[type[FedBNError], ...]
        of_input = (ConfigError, DataError, NormLayerError, *bad_input)
        raise typer.Exit(2 if isinstance(error, of_input) else 1) from error


class _Terminated(KeyboardInterrupt):
    """SIGTERM, as a batch system, systemd or Docker sends it before it kills."""


def _terminate(*_: object) -> None:
    raise _Terminated


@contextmanager
def interrupt(what_is_saved: Callable[[], str]) -> Iterator[None]:
    """Let SIGTERM end a command as Ctrl-C does; both say what is saved."""
    # Raised in the main thread, as KeyboardInterrupt is: every ``finally`` is done.
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except KeyboardInterrupt as error:
        raise type(error)(what_is_saved()) from error
    finally:
        signal.signal(signal.SIGTERM, before)


def report_own_data(settings: Any) -> None:
    """Print the counts of own data."""
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
    """The loss and the scores of a run so far; each stays until the next one."""

    def __init__(self, score: str) -> None:
        # the bar is narrow
        label = "acc" if score == "accuracy" else score
        self._labels = {
            "train-loss": "loss",
            f"test-{score}": label,
            f"personal-own-{score}": "own",
        }
        self._last: dict[str, str] = {}

    def after(self, line: Any) -> str:
        """Return them after a line of metrics; "" before the first."""
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
        # The speed is that of the last 1000 rounds: within rich's 30 s a large model
        # ends no two rounds.
        speed_estimate_period=math.inf,
    )


@contextmanager
def progress(
    total: int, name: str, score: str = "accuracy"
) -> Iterator[Callable[[Any], None]]:
    """Show each line of metrics: in a progress bar, or as a line where there is no
    terminal.
    """
    scores = Scores(score)
    # in a file or a pipe, lines that stay
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
    """Hide Flower's log of every round; warnings and errors still show."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
