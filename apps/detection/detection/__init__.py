"""A detector with BatchNorm, trained over four sites."""
