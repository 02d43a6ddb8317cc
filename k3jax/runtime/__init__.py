"""Talking to the device: kernels, their compilation, and the custom call that launches them."""
