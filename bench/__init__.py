"""Measurements and predictions on the virtual device, stock and patched."""
