"""What is wrong with the BatchNorm of a federation: measurements, and the findings drawn from them. Torch only."""
