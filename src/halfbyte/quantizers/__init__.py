"""From floating point to Codes, by name of the method."""

from halfbyte.quantizers.absmax import absmax as absmax
from halfbyte.quantizers.check import check_finite as check_finite
from halfbyte.quantizers.mse import mse as mse

METHODS = {"absmax": absmax, "mse": mse}
