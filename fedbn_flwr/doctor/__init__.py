"""Measurements of BatchNorm in a federation, and the findings drawn from them.

The package needs torch only. In reading order:

- ``diagnose``: the entry point. It measures, applies the rules and returns a diagnosis.
- ``rules``: all rules in the order of causes, and the rules for a model and its state.
- ``data_rules``: the rules for the clients' data and batches.
- ``thresholds``: the threshold of each rule, with its reason.
- ``remedies``: the remedies for each finding.
- ``measured``: all measurements of a diagnosis, which the rules read.
- ``measuring``: takes the measurements in order and notes those that are impossible.
- ``clients``: the clients' examples in memory, and batches of them.
- ``state``: the checks that need only a state dict.
- ``by_batch``: statistics of single batches, and distances between statistics.
- ``sites``: the table of the clients, with their labels and inputs.
- ``mismatch``: compares running statistics with the statistics of the test batch.
"""

from fedbn_flwr.doctor.diagnose import diagnose, diagnose_state
from fedbn_flwr.doctor.findings import Diagnosis, Finding, Remedy
from fedbn_flwr.doctor.measured import Training

__all__ = ["Diagnosis", "Finding", "Remedy", "Training", "diagnose", "diagnose_state"]
