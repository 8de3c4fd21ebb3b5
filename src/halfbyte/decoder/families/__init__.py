"""The table of model families: the only file that a new family touches is decoders.py, or encoders.py.

decoders.py        families that halfbyte computes, with their GGUF files
encoders.py        families of encoders
others.py          families that transformers computes, whose GGUF files halfbyte reads
gguf_settings.py   settings of single families that GGUF files express in a way of their own
"""

from halfbyte.decoder.families.decoders import FAMILIES as FAMILIES
from halfbyte.decoder.families.decoders import family_of_layer as family_of_layer
from halfbyte.decoder.families.decoders import family_of_model as family_of_model
from halfbyte.decoder.families.others import OTHERS as OTHERS
