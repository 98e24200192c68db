"""``DPWrapper``, a strategy with client-level differential privacy."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

from flwr.serverapp.strategy import Result

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.privacy.differential import ClientLevelDP
from fedbn_flwr.privacy.protection_settings import DPSettings
from fedbn_flwr.server.strategy import Strategy


class DPWrapper:
    """A strategy of this package with client-level differential privacy.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> strategy = DPWrapper(FedBN(), noise_multiplier=0.5, clipping_norm=2.0)
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, initial_arrays=arrays, num_rounds=2)
        >>> print(strategy.guarantee())
        epsilon = 15.46 at delta = 1e-05 after 2 releases: ...

    BatchNorm's counters count rounds here, not batches. Layers that use them
    (``momentum=None``) must be replaced.

    Args:
        strategy: the strategy. If it takes more from clients than their updates, it is
            refused when a run starts.
        noise_multiplier: z, the noise in the sum of updates in units of
            ``clipping_norm``.
        clipping_norm: C, the largest norm of a client's update, in the coordinates of
            ``privacy.coordinates``.
        where: the side that clips: "server", or "client" by the mod ``clipped_update``.
        file: a file for the releases. A run that is killed and resumed needs it,
            because it repeats rounds.
        fixed: names of the entries that no client trains (``fixed_entries(model)``).
            They get no noise.
        delta: delta of the stated epsilon, well below 1 / number of clients.

    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(
        self,
        strategy: Strategy,
        noise_multiplier: float = 0.0,
        clipping_norm: float = 1.0,
        *,
        where: Literal["server", "client"] = "server",
        file: Path | None = None,
        fixed: Collection[str] = (),
        delta: float = 1e-5,
    ) -> None:
        if where not in ("server", "client"):
            raise ConfigError(
                f"where={where!r} protects nothing. Use 'server' or 'client'"
            )
        chosen = DPSettings(
            dp=where,
            dp_noise_multiplier=noise_multiplier,
            dp_clipping_norm=clipping_norm,
            dp_delta=delta,
        )
        self.privacy = ClientLevelDP(chosen, file, fixed)
        self.strategy = strategy
        strategy.protect(self.privacy)

    def guarantee(self) -> str:
        """Return the guarantee of the rounds so far, in one sentence."""
        return self.privacy.guarantee()

    def start(self, *args: Any, **kwargs: Any) -> Result:
        """Run the rounds. See ``FedAvg.start``."""
        return self.strategy.start(*args, **kwargs)
