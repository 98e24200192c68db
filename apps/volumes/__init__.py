"""Volumes in NIfTI files: a site's data, MONAI's 3-D UNet, and Dice and HD95 by MONAI.
See docs/guides/own-data.md.
"""
