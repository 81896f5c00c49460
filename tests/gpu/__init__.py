"""The suite on a real GPU; skipped, saying why, where there is none."""
