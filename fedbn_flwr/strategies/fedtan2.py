"""FedTAN-II: FedTAN for M rounds, then FedAvg with the BN statistics frozen.

Wang, Shi, Chang 2023, arXiv:2301.02982, 5.4.

=========  ================================================================================================
sent down  as FedTAN in rounds 1..M; then the whole state, and the word to freeze
sent up    as FedTAN in rounds 1..M; then the whole state, the frozen statistics unchanged
kept       as FedTAN
cost       M rounds of FedTAN's, the others FedAvg's: F floats down, F up per client, one exchange
=========  ================================================================================================

M -> ``fedtan_rounds``, a number of rounds, a fraction of all, or "auto" (ours: FixBN's window rule on W =
``freeze_window`` rounds and tau = ``freeze_tau``). Differs from the paper: as FedTAN. Law: FedTAN's in rounds 1..M,
FixBN's after T* = M.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.strategies.fedtan import FedTAN, FedTANParams
from fedbn_flwr.strategies.fixbn import FixBNParams, FreezeSettings, Freezing

__all__ = ["FedTAN2", "FedTAN2Params"]


@dataclass(frozen=True, kw_only=True)
class FedTAN2Params(FedTANParams):
    """Parameters of FedTAN-II.

    Attributes:
        fedtan_rounds: M, a round (int), a fraction of all rounds (float in [0, 1]) or "auto".
        freeze_window: rounds in the window of the automatic M.
        freeze_tau: variance under which the automatic M is reached.
    """

    fedtan_rounds: int | float | str = 0.1
    freeze_window: int = 100
    freeze_tau: float = 2e-3

    def __post_init__(self) -> None:
        """Check the values, as FixBN does."""
        super().__post_init__()
        try:
            FixBNParams(freeze_at=self.fedtan_rounds, freeze_window=self.freeze_window, freeze_tau=self.freeze_tau)
        except ConfigError as error:
            raise ConfigError(str(error).replace("freeze_at=", "fedtan_rounds=")) from None


class FedTAN2(Freezing, FedTAN):
    """FedTAN for M rounds, then frozen BN statistics (``frozen_after`` = M)."""

    name = "fedtan2"
    summary_line = "FedTAN for M rounds, then FedAvg with BN statistics frozen"
    source = "Wang 2023, arXiv:2301.02982, 5.4"
    Params = FedTAN2Params

    def freeze_settings(self) -> FreezeSettings:
        """Return M and the window rule's numbers; gamma and beta go on learning."""
        params: FedTAN2Params = self.params
        return FreezeSettings(params.fedtan_rounds, False, params.freeze_window, params.freeze_tau)

    def synchronises(self, server_round: int) -> bool:
        """Tell whether the round is one of the first M."""
        return not self.frozen(server_round)
