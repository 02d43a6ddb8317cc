"""The Kimi K3 mixture-of-experts layer for JAX on NVIDIA GPUs."""
