"""``fedbn-flwr check-node`` checks a site before it joins."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedbn_flwr.lab.cli.console import (
    BEFORE,
    Overrides,
    app,
    exit_codes,
    quiet_flower,
    say,
)


@app.add(
    BEFORE,
    "check-node run.yaml --node-config data-path='/data' --superlink"
    " fl.example.org:8000 --root-certificates ca.crt",
    name="check-node",
)
def check_node(
    config: Annotated[Path, typer.Argument(help="YAML file: the settings of the run.")],
    set_: Overrides = None,
    node_config: Annotated[
        str, typer.Option(help="Config of this node, written as for flower-supernode.")
    ] = "",
    superlink: Annotated[
        str,
        typer.Option(
            help="HOST:PORT of the SuperLink; without it, no connection is tested."
        ),
    ] = "",
    root_certificates: Annotated[
        Path | None, typer.Option(help="Certificate of the server's CA, ca.crt.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option(help="This node's private key, node.key.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Connect without TLS.")
    ] = False,
) -> None:
    """Check this machine, its data and its connection to the server.

    The exit code is 1 if the machine cannot take part in the run.
    """
    from fedbn_flwr.lab.config.values import merged, read_settings

    with exit_codes():
        quiet_flower()
        # Only read the settings here. ``node_check.check_node`` checks them later and
        # lists their faults on the page that is printed below.
        settings = merged(read_settings(config, set_ or []))
        from fedbn_flwr.lab.node_check import Connection, check_node

        connection = Connection(superlink, root_certificates, key, insecure)
        page = check_node(settings, node_config, connection)
        say(str(page))
    if page.faults:
        raise typer.Exit(1)
