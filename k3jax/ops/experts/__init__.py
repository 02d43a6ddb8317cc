"""The routed experts."""
