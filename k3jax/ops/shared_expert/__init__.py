"""The shared expert."""
