"""The clock of a Flower strategy: for stock Flower and for ours, in Ray and in process."""

from __future__ import annotations

from typing import Any

from peers.work import Clock, Setting


def timed(kind: type[Any], clock: Clock, setting: Setting) -> type[Any]:
    """Return a subclass of a strategy that notes the end of each training, and
    evaluates in the last round alone.

    With ``setting.evaluate`` it evaluates in each round, and that is what is noted.
    The subclass leaves ``aggregate_train`` alone, as a user does: this package keeps
    whole replies for a class that reads them.
    """

    class Timed(kind):  # type: ignore[misc]
        def configure_evaluate(
            self, server_round: int, arrays: Any, config: Any, grid: Any
        ) -> Any:
            if not setting.evaluate:
                clock.lap()
            if not setting.evaluate and server_round <= clock.rounds:
                return []
            clock.begin()
            return list(super().configure_evaluate(server_round, arrays, config, grid))

        def aggregate_evaluate(self, server_round: int, replies: Any) -> Any:
            result = super().aggregate_evaluate(server_round, replies)
            if setting.evaluate:
                clock.lap()
            return result

    return Timed


def strategy_arguments(setting: Setting) -> dict[str, Any]:
    """Return the arguments of Flower's FedAvg for the clients of a setting."""
    return {
        "fraction_train": setting.a_round / setting.clients,
        "min_train_nodes": setting.a_round,
        "min_available_nodes": setting.clients,
        "fraction_evaluate": 1.0 if setting.personal else 0.0,
        "min_evaluate_nodes": setting.clients if setting.personal else 0,
    }


def ray_backend(workers: int) -> dict[str, Any]:
    """Return the settings of Flower's simulation for actors of one CPU each."""
    return {
        "init_args": {"num_cpus": workers, "num_gpus": 0},
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }
