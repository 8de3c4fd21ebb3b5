"""The weights of other projects <-> Codes, or floats.

awq.py, gptq.py, compressed_tensors.py    codes with zero points; zero_points.py: what they and ONNX share
hqq.py, torchao.py                        codes with float zeros
bitsandbytes.py, float4.py, float8.py     bitsandbytes; MXFP4 and NVFP4; 8-bit floats
"""
