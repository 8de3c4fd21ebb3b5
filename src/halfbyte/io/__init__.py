"""Other projects' files and weights <-> Codes.

files.py         opens and examines what users name
safetensors.py, gguf.py    files of tensors; tensors.py: what they share; gguf_metadata.py: the metadata of a model
onnx.py          one linear layer
weights/         the weights of other projects, tensor by tensor
"""
