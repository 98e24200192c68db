"""Trackers: places outside the run folder that show a run's numbers while it runs, behind one interface.

The server alone writes to them. ``metrics.jsonl`` and ``summary.json`` stay the record of a run; a tracker is a copy.
"""

from fedbn_flwr.lab.trackers.delivery import Delivery
from fedbn_flwr.lab.trackers.interface import Tracker, numbers_of
from fedbn_flwr.lab.trackers.registry import TRACKERS, deliveries, tracker_problems

__all__ = ["TRACKERS", "Delivery", "Tracker", "deliveries", "numbers_of", "tracker_problems"]
