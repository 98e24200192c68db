"""What a run says of its data and its model before it trains, in the log and in its folder."""

from __future__ import annotations

import logging

import numpy as np
from torch import nn

from fedbn_flwr.data import is_own
from fedbn_flwr.experiment.config import Config
from fedbn_flwr.experiment.data.partitioned_data import PartitionedData
from fedbn_flwr.experiment.data.report import data_report, sha256_of_data
from fedbn_flwr.experiment.data.splitting import split_to_json
from fedbn_flwr.experiment.output.folder import RunFolder
from fedbn_flwr.models import InitReport
from fedbn_flwr.norms.feature import NormalisedLinear

__all__ = ["log_feature_norm", "log_initial", "report_data"]

logger = logging.getLogger("flwr")


def report_data(folder: RunFolder, config: Config, data: PartitionedData | None) -> None:
    """Write the split of the data; log and write what was read of own data."""
    if data is None:
        return
    if split := split_to_json(data):
        folder.save_split(split)
    for line in _classes_without_client(config, data):
        logger.warning("%s", line)
    if not is_own(config.dataset):
        return
    report = data_report(data, config)
    logger.info("%s", report.text())
    for warning in report.warnings:
        logger.warning("%s", warning)
    figures = {**report.figures, "sha256": sha256_of_data(config)}
    folder.save_data(figures, report.notes, report.warnings)


def _classes_without_client(config: Config, data: PartitionedData) -> list[str]:
    """Return a line if the split leaves out classes that the data have."""
    train = data.dataset.train
    if not train.by_class:
        return []
    labels, names = train.labels.cpu().numpy(), data.dataset.label_names
    used = np.concatenate([*data.train, *data.validation])  # held-out clients train nothing
    total, held = (np.bincount(some, minlength=len(names)) for some in (labels, labels[used]))
    lacking = np.flatnonzero((total > 0) & (held == 0))
    if not len(lacking):
        return []
    remedy = ""
    if config.split_name() == "classes":
        needed = -(-len(names) // (len(data.train) + len(data.held_out)))
        remedy = f" Set classes-per-client to {needed} or more, or use more clients."
    return [
        f"{len(lacking)} of {len(names)} classes have no client ({', '.join(names[i] for i in lacking[:5])}"
        f"{', ...' if len(lacking) > 5 else ''}): their {total[lacking].sum()} training examples are not used, and no "
        f"model learns them.{remedy}"
    ]


def log_feature_norm(model: nn.Module) -> None:
    """Log which layer gets features of a fixed length: the user knows whether it is the classifier."""
    for path, module in model.named_modules():
        if isinstance(module, NormalisedLinear):
            logger.info("feature-norm: '%s' is the classifier; the features before it get a fixed length", path)


def log_initial(report: InitReport | None) -> None:
    """Log what the initial weights hold: as a warning if some of them, or of the model's entries, found no partner."""
    if report is not None:
        logger.log(logging.INFO if report.complete else logging.WARNING, "%s", report)
