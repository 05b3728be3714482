"""Exact training on uneven shares: sampler, gradients, batch norm statistics, calibration."""
