"""Throughput of a step, and the comparison with another trainer."""
