"""Number formats, and tensors quantized to them."""

from halfbyte.formats.codes import Codes as Codes
from halfbyte.formats.spec import PRESETS as PRESETS
from halfbyte.formats.spec import Format as Format
from halfbyte.formats.spec import as_format as as_format
