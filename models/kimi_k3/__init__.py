"""The stack of Kimi K3's MoE decoder layers."""

from models.kimi_k3.load import load_layers as load_layers
from models.kimi_k3.model import Attention as Attention
from models.kimi_k3.model import LayerParams as LayerParams
from models.kimi_k3.model import decoder_layer as decoder_layer
from models.kimi_k3.model import init_layers as init_layers
from models.kimi_k3.model import rms_norm as rms_norm
from models.kimi_k3.model import run_layers as run_layers
from models.kimi_k3.model import scan_layers as scan_layers
from models.kimi_k3.model import stack_layers as stack_layers
