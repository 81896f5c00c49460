"""Run on a real card: the suite, the calibration, and the page of their results."""
