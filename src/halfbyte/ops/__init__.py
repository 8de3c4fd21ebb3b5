"""The operations, as functions on Codes and Packed and as torch custom ops `halfbyte::…` below them.

functions.py  the public functions of linear layers and embeddings
library.py    the custom ops as torch sees them; registration.py: their derivatives, autocast, vmap; modes.py: what torch is doing around
cpu.py        the ops on the CPU
cuda.py       the ops on GPUs; replay.py: replay of recorded launches; graph_capture.py: CUDA graphs
row_codes.py  activations of W8A8 under torch.compile on GPUs
conv/         convolutions, and what lies between them
long_sums.py  requantized products of so many codes that an int32 may overflow, on all devices
grouped.py    linear layers of experts, on all devices
transformer/  layers of language models
fake_quantize.py    quantized and dequantized, with gradients
checks.py     validation of arguments, on every device; tensors.py: tensors where kernels want them
"""

from halfbyte.ops import library as library
from halfbyte.ops.functions import dequantize as dequantize
from halfbyte.ops.functions import embedding as embedding
from halfbyte.ops.functions import in_order as in_order
from halfbyte.ops.functions import join as join
from halfbyte.ops.functions import linear as linear
from halfbyte.ops.functions import linear_geglu as linear_geglu
from halfbyte.ops.functions import linear_gelu as linear_gelu
from halfbyte.ops.functions import linear_low_rank as linear_low_rank
from halfbyte.ops.functions import pack as pack
from halfbyte.ops.functions import qlinear as qlinear
from halfbyte.ops.functions import quantize as quantize
from halfbyte.ops.functions import requantization_table as requantization_table
from halfbyte.ops.functions import unpack as unpack
from halfbyte.ops.grouped import grouped_linear as grouped_linear
