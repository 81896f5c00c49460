"""Scenarios that tests alone run; as those of bench/scenarios."""
