"""Models for use without their Python source.

example.py      what a model is traced with: inputs, and which of their sizes vary
program.py      `export_program` and `load_program`: a compiled program of torch.export, with halfbyte's kernels
onnx_model.py   `export_onnx`; onnx_graph.py: what replaces halfbyte's ops there, onnx_static.py: networks on int8 codes
"""
