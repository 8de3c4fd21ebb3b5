"""Group offloading of quantized layers. Imported with it (see on_import.py)."""

from halfbyte.integrations.diffusers import api

api.support_group_offloading()
