"""Layers of the architectures."""

from lineage.models.layers.adaptive import AdaptiveEmbed
from lineage.models.layers.attend import Additive, Mask, Weighting, dense, dot_product
from lineage.models.layers.attention import Attention
from lineage.models.layers.block import Block, Stack
from lineage.models.layers.cache import Cache, LayerCache, Memory, Rows, States
from lineage.models.layers.dropout import Dropout
from lineage.models.layers.embed import Embed, PatchEmbed, patches
from lineage.models.layers.linear import Linear
from lineage.models.layers.mlp import ACTIVATIONS, Mlp, gelu
from lineage.models.layers.norm import BatchNorm, LayerNorm, RMSNorm
from lineage.models.layers.position import Learned, sincos_2d
from lineage.models.layers.recurrent import Cell, Layer
from lineage.models.layers.sparse import BlockSparse
