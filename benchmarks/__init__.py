"""Benchmarks: each module times one part against what bounds it."""
