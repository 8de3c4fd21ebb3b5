"""From floating point to Codes. METHODS need only the weight, CALIBRATED methods also the layer's inputs."""

from collections.abc import Callable

from torch import Tensor

from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format
from halfbyte.quantizers.absmax import absmax as absmax
from halfbyte.quantizers.check import check_finite as check_finite
from halfbyte.quantizers.fixed_grid import quantize_to_grid as quantize_to_grid
from halfbyte.quantizers.hqq import hqq as hqq
from halfbyte.quantizers.mse import mse as mse

METHODS: dict[str, Callable[[Tensor, Format, str], Codes]] = {"absmax": absmax, "mse": mse, "hqq": hqq}
CALIBRATED = ("gptq", "awq")
