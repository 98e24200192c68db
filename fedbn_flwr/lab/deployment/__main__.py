"""The commands behind ``make compose`` and ``federation-...``; the service ``register``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from fedbn_flwr.atomic_file import write_atomically
from fedbn_flwr.engines.flower_run import BIN, running
from fedbn_flwr.errors import EngineError, FedBNError
from fedbn_flwr.lab.deployment.compose import given_variables
from fedbn_flwr.lab.deployment.compose_nodes import write_for_nodes
from fedbn_flwr.lab.deployment.federation import Federation
from fedbn_flwr.lab.deployment.layout import Layout
from fedbn_flwr.lab.deployment.runs import Outcome, follow_run, nodes_online, run_app, stop_run, unfinished_runs

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
Folder = Annotated[Path, typer.Option(help="state, logs and certificates of the federation")]
_HOME = Path("runs/federation")
_WAIT_SECONDS = 180.0


@app.command()
def compose(
    nodes: Annotated[int, typer.Option(help="how many nodes")] = 3,
    folder: Annotated[Path, typer.Option(help="the checkout, with docker-compose.yml and docker")] = Path(),
) -> None:
    """Write docker-compose.yml and docker/machine-*.yml for another number of nodes; the last is with the server.

    Node 1's part is repeated; what was changed by hand in the parts of other nodes is lost.
    """
    for line in write_for_nodes(folder, nodes) or ["nothing to change"]:
        typer.echo(line)


@app.command()
def register(connection: str, keys: Path) -> None:
    """Register the nodes of ``KEYS/*.pub`` that are not registered yet."""
    for key in sorted(keys.glob("*.pub")):
        command = [str(BIN / "flwr"), "supernode", "register", str(key), connection, "--name", key.stem]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        output = (done.stdout + done.stderr).strip()
        if done.returncode and "already" not in output:  # Flower's answer has no code for it
            raise EngineError(f"{key.name} could not be registered: {output}")
        typer.echo(f"{key.stem}: {'was already registered' if done.returncode else 'registered'}")


@app.command()
def up(
    definition: Annotated[Path, typer.Option(help="the compose file")] = Path("docker-compose.yml"),
    nodes: Annotated[int, typer.Option(help="how many nodes")] = 3,
    folder: Folder = _HOME,
) -> None:
    """Start a federation in the background and wait until every node is online.

    The variables of the compose file come from the environment or the file .env beside it, as under Docker Compose.
    """
    if unused := given_variables(definition, nodes, os.environ)[1]:
        typer.echo(
            f"set, and not used: {', '.join(unused)}. There are nodes 1 to {nodes}, without containers; addresses are "
            f"their own, keys in {folder / 'certs'}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    if running(_supervisor(folder)) or _services(folder):
        raise EngineError(f"a federation is up in {str(folder)!r}; `make federation-down` ends it")
    (folder / "ready").unlink(missing_ok=True)
    command = [sys.executable, "-m", __package__, "supervise", "--definition", str(definition)]
    command += ["--nodes", str(nodes), "--folder", str(folder)]
    with (folder / "supervisor.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    write_atomically(folder / "supervisor.pid", f"{process.pid}\n")
    deadline = time.monotonic() + _WAIT_SECONDS
    try:
        while not (folder / "ready").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise EngineError(f"the federation did not start:\n{(folder / 'supervisor.log').read_text()[-3000:]}")
            time.sleep(0.1)
    except BaseException:  # also Ctrl-C: nothing is left behind
        process.terminate()
        raise
    typer.echo(f"{nodes} nodes are online; logs are in {folder / 'logs'}")


@app.command(hidden=True)
def supervise(definition: Path = Path("docker-compose.yml"), nodes: int = 3, folder: Folder = _HOME) -> None:
    """Keep a federation up until SIGTERM: restart services that end, as the restart policies say."""

    def leave(*_: object) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, leave)
    variables, _ = given_variables(definition, nodes, os.environ)
    with Federation(definition, nodes, folder=folder, variables=variables) as federation:
        (folder / "ready").touch()
        while True:
            time.sleep(1)
            for name in federation.restart_dead():
                typer.echo(f"{name} ended and was restarted")


@app.command()
def run(
    run_config: Annotated[str, typer.Argument(help="as for `flwr run --run-config`")] = "",
    folder: Folder = _HOME,
) -> None:
    """Run the app in the running federation; exit with code 1 unless the run completes.

    After Ctrl-C the run goes on; ``stop`` ends it.
    """
    layout = Layout.load(folder.absolute())
    if (online := nodes_online(layout)) < layout.num_nodes:
        typer.echo(
            f"{online} of {layout.num_nodes} nodes are online; {folder / 'supervisor.log'} has what was restarted"
        )
    try:
        outcome = run_app(layout, run_config, on_line=typer.echo)
    except KeyboardInterrupt:
        for run_id in unfinished_runs(layout):
            typer.echo(f"run {run_id} goes on; `make federation-stop` ends it")
        raise typer.Exit(130) from None
    _end(outcome)


@app.command("flwr-run", hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def flwr_run(context: typer.Context, application: str, connection: str) -> None:
    """Do ``flwr run``; exit with code 1 unless the run completes: the service ``cli``."""
    try:
        outcome = follow_run([application, connection, *context.args], os.environ, on_line=typer.echo)
    except KeyboardInterrupt:
        typer.echo(f"the run goes on; `flwr stop RUN_ID {connection}` ends it")
        raise typer.Exit(130) from None
    _end(outcome)


def _end(outcome: Outcome) -> None:
    """Say how a run ended; exit with code 1 unless it completed."""
    typer.echo(f"run {outcome.run_id}: {outcome.status}")
    if not outcome.completed:
        raise typer.Exit(1)


@app.command()
def stop(
    run_ids: Annotated[list[str] | None, typer.Argument(help="default: every run that has not ended")] = None,
    folder: Folder = _HOME,
) -> None:
    """End runs of the running federation; the federation stays up."""
    layout = Layout.load(folder.absolute())
    ended = run_ids or unfinished_runs(layout)
    for run_id in ended:
        stop_run(layout, run_id)
        typer.echo(f"run {run_id}: stopped")
    if not ended:
        typer.echo("no run is going on")


@app.command()
def down(folder: Folder = _HOME) -> None:
    """End the running federation, if there is one; its folder stays."""
    pid = _supervisor(folder)
    if running(pid):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _WAIT_SECONDS
    while running(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    if running(pid):
        raise EngineError(f"the supervisor of the federation, process {pid}, does not end")
    while services := _services(folder):  # left by a supervisor that was killed
        if time.monotonic() > deadline:
            raise EngineError(f"the federation's processes {', '.join(map(str, services))} do not end")
        for service in services:
            with suppress(ProcessLookupError):  # it has already ended
                os.kill(service, signal.SIGKILL)
        time.sleep(0.1)
    (folder / "supervisor.pid").unlink(missing_ok=True)
    typer.echo("no process of the federation is running")


def _supervisor(folder: Path) -> int:
    """Return the process id of a folder's supervisor, else 0; after a reboot another process may have its id."""
    path = folder / "supervisor.pid"
    text = path.read_text().strip() if path.is_file() else ""
    pid = int(text) if text.isdecimal() else 0
    return pid if b"supervise" in _command(pid) else 0


def _services(folder: Path) -> list[int]:
    """Return the Flower processes that use this folder's keys."""
    certs = str(folder.absolute() / "certs").encode()
    pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    return [pid for pid in pids if certs in (command := _command(pid)) and _is_flower(command)]


def _is_flower(command: bytes) -> bool:
    """Return whether a command line runs a Flower program; these are scripts: "python flower-superlink"."""
    words = [word.rpartition(b"/")[2] for word in command.split(b"\0")[:2]]
    return any(word.startswith((b"flower-", b"flwr-")) for word in words)


def _command(pid: int) -> bytes:
    """Return the command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


if __name__ == "__main__":
    try:
        app()
    except FedBNError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        sys.exit(1)
