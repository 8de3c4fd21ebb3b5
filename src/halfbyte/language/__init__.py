"""Language models without transformers.

Models
  model.py                `LanguageModel`: opens a checkpoint of any kind, generates and streams text
  generate.py             `Batch`: sequences that join and leave while others run; `Generation`: one of them
  report.py               `LanguageReport`: what was measured, next to what a plan is expected to take
  speculate.py            tokens that are guessed, and checked several at a time
  checkpoint_tensors.py   the tensors of a checkpoint, for `decoder.build`, packed for a device (device.py)
Text
  tokenizer.py            `Tokenizer`: text ↔ token ids, of a folder (tokenizer_folder.py) or a .gguf file
  chat_template.py        `render`: messages → prompt, within limits (template_limits.py)
  text_stream.py          `TextStream`: token ids → text as it is generated, up to a stop string
  sampling/               logits → the next token
"""

from halfbyte.language.chat_template import render as render
from halfbyte.language.sampling.sampler import Choice as Choice
from halfbyte.language.sampling.sampler import Sampler as Sampler
from halfbyte.language.sampling.sampler import Sampling as Sampling
from halfbyte.language.text_stream import TextStream as TextStream
from halfbyte.language.tokenizer import Tokenizer as Tokenizer
