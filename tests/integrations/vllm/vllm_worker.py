"""What vLLM says to prompts: in this process, or as a program, which tensor parallelism needs.

python vllm_worker.py FOLDER OUT.pt '{"tensor_parallel_size": 2}'
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

PROMPTS = [[(7 * i * i + 3 * i) % 90 + 3 for i in range(24)], [3, 8, 2, 5], [i % 80 + 3 for i in range(40)]]
NEW = 12
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 128,
    "max_logprobs": -1,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
    "distributed_executor_backend": "uni",
}


class Answer(NamedTuple):
    """Of a prompt of P tokens: log-probabilities [P - 1, vocabulary] after each token but the last, and the most likely NEW tokens."""

    logprobs: Tensor
    tokens: list[int]


def ask(folder: Path, adapter: Path | None = None, **settings: Any) -> list[Answer]:
    """The answers of vLLM to PROMPTS, all in one batch; without log-probabilities where there is an adapter, for which vLLM 0.32 has none
    of prompts."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    model = LLM(str(folder), **SETTINGS | settings)
    sampling = SamplingParams(
        temperature=0, max_tokens=NEW, ignore_eos=True, prompt_logprobs=-1 if adapter is None else None, detokenize=False
    )
    lora = None if adapter is None else LoRARequest("adapter", 1, str(adapter))
    outputs = model.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False, lora_request=lora)
    answers = []
    for output in outputs:
        rows = [[row[token].logprob for token in range(len(row))] for row in (output.prompt_logprobs or [])[1:]]
        answers.append(Answer(torch.tensor(rows), list(output.outputs[0].token_ids)))
    del model
    gc.collect()
    return answers


def reference(model: Any) -> list[Answer]:
    """The answers of a model of transformers, one prompt after the other."""
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            logprobs = model(ids).logits[0, :-1].float().log_softmax(-1)
            for _ in range(NEW):
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], -1)
        answers.append(Answer(logprobs, ids[0, len(prompt) :].tolist()))
    return answers


if __name__ == "__main__":
    folder, out, settings = sys.argv[1:]
    torch.save([tuple(answer) for answer in ask(Path(folder), **json.loads(settings))], out)
