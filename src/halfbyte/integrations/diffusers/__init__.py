"""diffusers: image and video models are quantized while they load, and load again after `save_pretrained`.

api.py         what halfbyte uses of diffusers that is not documented, and nothing else does
quantizer.py   the quantizer of `from_pretrained` and `from_single_file`
offloading.py, single_file.py  what is changed in group offloading and `from_single_file`, once they are imported
untested.py    quantization is refused in other versions of diffusers than those that were tested
"""
