"""The operations, as functions on Codes and Packed and as torch custom ops `halfbyte::…` below them.

functions.py  the public functions
library.py    the custom ops as torch sees them: schemas, shapes, gradients
checks.py     validation of arguments, on every device
cpu.py        the ops on the CPU
cuda.py       the ops on GPUs
grouped.py    mixture of experts, on all devices
decoding.py   the steps of a decoder layer for one token, on all devices
"""

from halfbyte.ops import library as library
from halfbyte.ops.functions import dequantize as dequantize
from halfbyte.ops.functions import embedding as embedding
from halfbyte.ops.functions import linear as linear
from halfbyte.ops.functions import linear_gelu as linear_gelu
from halfbyte.ops.functions import pack as pack
from halfbyte.ops.functions import qlinear as qlinear
from halfbyte.ops.functions import quantize as quantize
from halfbyte.ops.functions import requantization_table as requantization_table
from halfbyte.ops.functions import unpack as unpack
from halfbyte.ops.grouped import grouped_linear as grouped_linear
