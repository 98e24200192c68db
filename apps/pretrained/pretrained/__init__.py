"""A pretrained network at four scanners."""
