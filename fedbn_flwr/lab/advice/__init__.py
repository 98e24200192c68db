"""The command ``fedbn-flwr advise`` finds the method that suits the sites.

``advise`` takes a user's model, data and training loop. ``advise_config`` takes a config.

- ``candidates``: the methods to try, with the reason for each.
- ``halving``: short runs of all candidates, then longer runs of the better half.
- ``verdict``: the ranking, the sites and the answer in sentences.
- ``advisor``: the whole command. It writes ``advice.json`` and ``recommended.yaml``.
"""

from __future__ import annotations

from fedbn_flwr.lab.advice.advisor import advise, advise_config

__all__ = ["advise", "advise_config"]
