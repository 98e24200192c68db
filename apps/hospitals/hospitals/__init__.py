"""Several hospitals, one model."""
