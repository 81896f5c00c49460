"""Measurements and predictions on the virtual device, official beside ours."""
