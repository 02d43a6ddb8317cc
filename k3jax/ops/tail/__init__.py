"""The latent tail: reduce over ranks, norm, up-projection, shared add."""
