"""Benchmarks: time over the memory floor, and never a time whose output was not checked."""
