"""The number formats of weights and activations, as types."""
