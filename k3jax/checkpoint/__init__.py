"""Kimi K3 checkpoints: reading one layer onto its devices, and writing synthetic ones."""

from k3jax.checkpoint.load import load_layer as load_layer
from k3jax.checkpoint.source import Checkpoint as Checkpoint
from k3jax.checkpoint.write import write_checkpoint as write_checkpoint
