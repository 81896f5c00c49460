"""What runs on a real card: the suite, the calibration, the page of their results."""
