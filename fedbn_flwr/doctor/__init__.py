"""What is wrong with the BatchNorm of a federation: measurements, and the findings
drawn from them. Torch only.

In reading order:

- ``diagnose``: the door: measure, apply the rules, return a diagnosis.
- ``findings``: what is returned: findings with evidence and remedies.
- ``rules``: all rules in the order of causes, and those for the model and its state.
- ``data_rules``: rules for the clients' data and batches.
- ``thresholds``: the number behind each rule, with its reason.
- ``remedies``: what to try for each finding.
- ``situations``: the table of advice with measured gains, as in ``docs/choose.md``.
- ``measured``: all measurements of a diagnosis, which the rules read.
- ``measuring``: does the measurements in order, and notes those that cannot be done.
- ``clients``: the clients' examples in memory, and batches of them.
- ``state``: what a state dict alone shows.
- ``by_batch``: statistics of single batches, and distances between statistics.
- ``differences``: how the clients differ: classes, and inputs of BatchNorm.
- ``each_client``: which client stands out from the others.
- ``mismatch``: running statistics against those of the test batch.
"""

from fedbn_flwr.doctor.diagnose import diagnose, diagnose_state
from fedbn_flwr.doctor.findings import Diagnosis, Finding, Remedy
from fedbn_flwr.doctor.measured import Training

__all__ = ["Diagnosis", "Finding", "Remedy", "Training", "diagnose", "diagnose_state"]
