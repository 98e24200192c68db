"""What is wrong with the BatchNorm of a federation: measurements, and the findings
drawn from them. Torch only.

Measurements are pure functions: ``by_batch``, ``differences``, ``each_client``,
``mismatch`` and ``state``; ``measuring`` calls them in order. ``rules`` and
``data_rules`` turn them into findings, with the numbers in ``thresholds`` and the texts
in ``remedies``. ``diagnose`` does all of it.
"""

from fedbn_flwr.doctor.diagnose import diagnose, diagnose_state
from fedbn_flwr.doctor.findings import Diagnosis, Finding, Remedy
from fedbn_flwr.doctor.measured import Training

__all__ = ["Diagnosis", "Finding", "Remedy", "Training", "diagnose", "diagnose_state"]
