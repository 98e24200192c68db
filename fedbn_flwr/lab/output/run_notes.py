"""What a run notes of its data and model before it trains."""

from __future__ import annotations

import logging

from torch import nn

from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.data import is_own
from fedbn_flwr.lab.models import InitReport
from fedbn_flwr.lab.output.folder import RunFolder
from fedbn_flwr.lab.partitioned.counts import (
    data_counts,
    data_text,
    data_warnings,
    sha256_of_data,
)
from fedbn_flwr.lab.partitioned.partitioned_data import PartitionedData
from fedbn_flwr.norms.feature import NormalisedLinear

__all__ = ["log_feature_norm", "log_initial", "report_data"]

logger = logging.getLogger("flwr")


def report_data(
    folder: RunFolder, config: Config, data: PartitionedData | None
) -> None:
    """Log what is unusual in the data; log and write the counts of own data."""
    if data is None:
        return
    warnings = data_warnings(data, config)
    for line in warnings:
        logger.warning("%s", line)
    if not is_own(config.dataset):
        return
    # Own data have no name that says what they are: another run can compare.
    logger.info("%s", data_text(data, config))
    of_data = {
        "dataset": config.dataset,
        "examples": data_counts(data),
        "sha256": sha256_of_data(config),
    }
    folder.save("data.json", {**of_data, "warnings": warnings})


def log_feature_norm(model: nn.Module) -> None:
    """Log which layer gets features of a fixed length."""
    # It is found by its place; the user knows whether it is the classifier.
    for path, module in model.named_modules():
        if isinstance(module, NormalisedLinear):
            logger.info(
                "feature-norm: '%s' is the classifier; the features before it get a"
                " fixed length",
                path,
            )


def log_initial(report: InitReport | None) -> None:
    """Log what the initial weights hold."""
    if report is None:
        return
    # a warning if some of them, or of the model's entries, found no partner
    level = logging.INFO if report.complete else logging.WARNING
    logger.log(level, "%s", report)
