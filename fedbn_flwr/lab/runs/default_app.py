"""The default Flower app, with all settings in the run config."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedbn_flwr.client import client_app as make_client_app
from fedbn_flwr.errors import ConfigError, DivergedError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.runs.node import client_fn
from fedbn_flwr.lab.runs.node_guard import guarded, reason

logger = logging.getLogger("flwr")

client_app = make_client_app(client_fn, mods=[guarded], reason=reason)
server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the server part of ``flwr run``.

    Results go to ``out``, or to ``$FLWR_HOME/fedbn-runs/RUN_ID``.
    """
    # Import here, because only the server needs these modules, but each client imports
    # this module as well.
    from fedbn_flwr.lab.runs.check_start import checked_config
    from fedbn_flwr.lab.runs.serve import serve

    config = Config.make(context.run_config, complete=True)
    out = _out(config, context.run_id)
    checked = checked_config(config)
    # docker/run.py repeats the last line with "resume=true" if the run fails.
    if config.checkpoint_every:
        logger.info(
            "results: %s. If the run ends early, continue it by the same command with"
            " out='%s' resume=true in its --run-config",
            out,
            out,
        )
    try:
        serve(grid, checked, out)
    except DivergedError:
        logger.error(
            "resume=true would end in the same way: change the settings, and start a"
            " new run"
        )
        raise
    except ConfigError:
        # The cause may be a setting, but also a missing node or a port in use.
        then = "starts it again (there is no checkpoint for resume=true)"
        if (out / "checkpoint").is_dir():
            then = f"continues it with out='{out}' resume=true in its --run-config"
        logger.error(
            "remove the cause of this error first. Then the same command %s", then
        )
        raise


def _out(config: Config, run_id: int) -> Path:
    if config.out and not Path(config.out).is_absolute():
        raise ConfigError(
            f"out={config.out!r} is relative, but the working directory under `flwr"
            f" run` is not yours. Write out='/the/absolute/path/{config.out}'."
        )
    if config.resume and not config.out:
        raise ConfigError(
            "resume=true needs out='/the/absolute/path' of the run to continue."
        )
    if config.out:
        return Path(config.out)
    home = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")
    return home / "fedbn-runs" / str(run_id)
