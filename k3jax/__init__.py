"""The Kimi K3 mixture-of-experts layer for JAX on NVIDIA GPUs.

Everything a user needs is here; modules below are the library's own rooms. Flax's linen module is
in `k3jax.linen`.
"""

from k3jax.checkpoint import load_layer as load_layer
from k3jax.checkpoint import write_checkpoint as write_checkpoint
from k3jax.config import MoEConfig as MoEConfig
from k3jax.export import export_function as export_function
from k3jax.export import load_function as load_function
from k3jax.layer import moe_layer as moe_layer
from k3jax.nnx import KimiK3MoE as KimiK3MoE
from k3jax.ops.experts.api import ExpertsTier as ExpertsTier
from k3jax.ops.experts.api import prepare_params as prepare_params
from k3jax.ops.router.api import RouterTier as RouterTier
from k3jax.ops.tail.api import TailTier as TailTier
from k3jax.parallel import Parallel as Parallel
from k3jax.params import MoEParams as MoEParams
from k3jax.params import init_params as init_params
from k3jax.params import param_specs as param_specs
from k3jax.plan import LayerPlan as LayerPlan
from k3jax.plan import plan_layer as plan_layer
from k3jax.runtime.target import Target as Target
