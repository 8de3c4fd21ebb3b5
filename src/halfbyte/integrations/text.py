"""Opens language models of any kind that halfbyte reads, and generates and times text."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import StaticCache
from transformers.generation.configuration_utils import CompileConfig
from transformers.generation.streamers import TextStreamer

from halfbyte import checkpoint
from halfbyte.checkpoint.architecture import check_sizes, known_architecture
from halfbyte.checkpoint.files import weight_files
from halfbyte.checkpoint.foreign import settings_of
from halfbyte.checkpoint.manifest import CONFIG, SECTION
from halfbyte.checkpoint.plan import plan_model
from halfbyte.checkpoint.quantization_config import METHOD
from halfbyte.checkpoint.sources import open_floats
from halfbyte.errors import ArgumentError, CheckpointError, HalfbyteError, UnsupportedError, not_there
from halfbyte.integrations import attention
from halfbyte.integrations.calls import KV_CACHE
from halfbyte.integrations.compiling import compile_ahead
from halfbyte.integrations.generating import check_tokens, first_size, generate_fast, new_cache
from halfbyte.integrations.graphs import capacity
from halfbyte.integrations.optimizing import optimize_
from halfbyte.integrations.transformers import HalfbyteConfig
from halfbyte.io.files import check_regular, is_file, is_there, paths_in
from halfbyte.io.gguf import is_gguf
from halfbyte.io.safetensors import Reader, load_json
from halfbyte.layouts.base import round_up
from halfbyte.nn.config import Config
from halfbyte.nn.modules import QuantModule
from halfbyte.nn.parallel import is_parallel, parallelize_, whole_rows
from halfbyte.nn.sparsity import drop_zeros_

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_CACHE_STEP = 64  # tokens
_SDPA = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True, slots=True)
class Generated:
    """A generated text.

    tokens           of the prompt and of the answer, [t]
    prompt_tokens    processed: those of the prompt that were not in the cache
    new_tokens       generated
    prompt_seconds   until the first token of the answer
    decode_seconds   from the first to the last
    """

    text: str
    tokens: Tensor
    prompt_tokens: int
    new_tokens: int
    prompt_seconds: float
    decode_seconds: float

    @property
    def prompt_rate(self) -> float:
        """Tokens of the prompt per second, the first token of the answer included in the time."""
        return self.prompt_tokens / self.prompt_seconds

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first; 0 if there are none."""
        return (self.new_tokens - 1) / self.decode_seconds if self.new_tokens > 1 else 0.0


def open_model(
    path: Path,
    device: str = "cpu",
    config: Config | None = None,
    dtype: torch.dtype | None = None,
    mesh: DeviceMesh | None = None,
    *,
    sparse: bool | None = None,
) -> tuple[Any, Any]:
    """(causal language model in evaluation mode, tokenizer) of a Hugging Face folder, a halfbyte checkpoint or a .gguf file.

    config  how to quantize a floating-point model as it loads
    dtype   of the computation. By default: on a CPU float32, whatever the files hold, as few CPUs are fast in less; on a GPU the dtype of
            config.json, and bfloat16 for a .gguf file
    mesh    of processes that share the model, each on its own `device`
    sparse  as for `pack`

    Scales and offsets of a .gguf file that would be float32 are rounded to float16. The network is not used, no code from the folder is
    run, and no pickle is opened. Raises CheckpointError, ArgumentError.
    """
    if dtype is None and _is_cpu(device):
        dtype = torch.float32
    if not is_there(path):
        raise not_there(path, "a Hugging Face folder, a halfbyte folder or a .gguf file")
    if is_file(path) and is_gguf(path):
        from halfbyte.integrations.gguf import load_gguf

        model, tokenizer = load_gguf(path, device, dtype or torch.bfloat16, format=config, mesh=mesh, half_scales=True)
        if tokenizer is None:
            raise CheckpointError(f"{path} has no tokenizer: start from another file of the model")
        return ready(model, device, dtype, sparse), tokenizer
    if not is_file(path / CONFIG):
        raise CheckpointError(f"{path} is not a language model: name a Hugging Face folder, a halfbyte folder or a .gguf file")
    described = load_json(path / CONFIG)
    if SECTION in described or settings_of(path, described):
        model = _open_quantized(path, described, device, config, dtype, mesh)
    else:
        asked = None if config is None else HalfbyteConfig(config)
        if asked is not None and mesh is None:  # a GPU of several that share a model may have no room for the whole
            asked.device = device
        model = _from_pretrained(path, described, dtype, **({} if asked is None else {"quantization_config": asked}))
    if not callable(getattr(model, "generate", None)):
        raise UnsupportedError(f"{path} holds a {type(model).__name__}, which does not generate text: name a causal language model")
    if mesh is not None and not is_parallel(model):
        parallelize_(model, mesh)
    return ready(model, device, dtype, sparse), open_tokenizer(path)


def open_tokenizer(folder: Path) -> Any:
    """The tokenizer of a Hugging Face folder. Raises CheckpointError."""
    if not any(file.name.startswith(("tokenizer", "vocab", "spiece")) for file in paths_in(folder)):
        raise CheckpointError(f"{folder} has no tokenizer: copy tokenizer.json and tokenizer_config.json of the same model to it")
    with _clear_errors(folder):
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def check_prompt(model: Any, prompt: Mapping[str, Tensor]) -> None:
    """Raises ArgumentError for a prompt without tokens, or with tokens outside of the model's vocabulary."""
    ids = prompt["input_ids"]
    check_tokens(ids)
    known, largest = whole_rows(model.get_input_embeddings()), int(ids.max())
    if largest >= known:
        raise ArgumentError(f"the prompt has token {largest}, the model {known} tokens: its tokenizer is another model's")


def generate(
    model: Any,
    tokenizer: Any,
    prompt: Mapping[str, Tensor],
    show: Callable[[str], object],
    *,
    compiled: bool = False,
    cache: Any = None,
    **settings: Any,
) -> Generated:
    """Generates a continuation of a prompt.

    prompt    the tokenizer's output for one text: input_ids [1, t] and more
    show      called with the text piece by piece, in whole words
    compiled  decode under torch.compile with a static cache: takes up to minutes to start, then saves Python's overhead in each step. On a
              GPU a CUDA graph does so without (generating.py)
    cache     a cache of transformers with the beginning of the prompt; it is extended. `generating.new_cache` makes one
    settings  of transformers' `generate`: max_new_tokens, do_sample, …

    Raises ArgumentError as `check_prompt` does.
    """
    check_prompt(model, prompt)
    inputs = {name: tensor.to(model.device) for name, tensor in prompt.items()}
    count = inputs["input_ids"].shape[1]
    known = 0
    if cache is not None:
        known, settings[KV_CACHE] = int(cache.get_seq_length()), cache
    if compiled:
        compile_config = CompileConfig(fullgraph=True, dynamic=False, mode="reduce-overhead" if model.device.type == "cuda" else "default")
        compile_config._compile_all_devices = True  # type: ignore[assignment]  # otherwise it compiles on GPUs only
        settings |= {"cache_implementation": "static", "compile_config": compile_config}
        # A cache of another length is compiled again, so lengths are rounded up.
        settings.setdefault("max_cache_len", round_up(count + settings.get("max_new_tokens", 0), _CACHE_STEP))
    if tokenizer.pad_token_id is None:
        settings.setdefault("pad_token_id", tokenizer.eos_token_id)
    clock = _Clock(tokenizer, show)
    with torch.inference_mode(), _as_wanted(model.device):
        if not known and not compiled and (cache is None or isinstance(cache, StaticCache)):
            there = 0 if cache is None else capacity(cache, model)
            size = there if there > count else first_size(count, count + settings.get("max_new_tokens", 20))  # transformers' default
            compile_ahead(model, 1, count, partial(new_cache, model, size))
        if compiled:  # twice: a first decoding step compiles, a second replays
            model.generate(
                **inputs, stopping_criteria=[lambda ids, scores: ids.new_full((1,), ids.shape[1] > count + 2).bool()], **settings
            )
        answer: Tensor = model.generate(**inputs, streamer=clock, **settings)
    text = tokenizer.decode(answer[0, count:], skip_special_tokens=True)
    start, first, last = clock.times[0], clock.times[min(1, len(clock.times) - 1)], clock.times[-1]
    return Generated(text, answer[0].cpu(), count - known, answer.shape[1] - count, first - start, last - first)


@contextmanager
def _as_wanted(device: torch.device) -> Iterator[None]:
    """On a GPU: torch's attention without cuDNN's, which takes a tenth of a second to plan whenever a cache has grown; and without torch's
    advice to use TensorFloat32, which would round more than quantization did."""
    with warnings.catch_warnings(), nullcontext() if device.type == "cpu" else sdpa_kernel(_SDPA):
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        yield


class _Clock(TextStreamer):
    """Passes text on as it comes, and records the times of the prompt and of each token."""

    def __init__(self, tokenizer: Any, show: Callable[[str], object]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._show = show
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        super().put(value)  # type: ignore[no-untyped-call]
        self.times.append(time.perf_counter())

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._show(text)


def _open_quantized(
    path: Path, described: Mapping[str, Any], device: str, config: Config | None, dtype: torch.dtype | None, mesh: DeviceMesh | None
) -> Any:
    section = described.get("quantization_config")
    if config is None and SECTION not in described and isinstance(section, Mapping) and section.get("quant_method") == METHOD:
        return _from_pretrained(path, described, dtype)
    return checkpoint.load(path, device, format=config, mesh=mesh)


def _from_pretrained(path: Path, described: Mapping[str, Any], dtype: torch.dtype | None, **settings: Any) -> Any:
    check_regular(path)
    settings |= {"local_files_only": True, "trust_remote_code": False, "dtype": dtype or "auto"}
    check_sizes(described)
    files = Reader(weight_files(path)).specs()  # says what is wrong with a file more clearly than transformers
    floats = "quantization_config" not in described
    for name, spec in files.items() if floats else ():
        if name.endswith(".weight") and not spec.dtype.is_floating_point:  # transformers would take the codes for numbers
            what = f"{name} of {path} is {spec.dtype}, and config.json does not say how it is quantized"
            raise CheckpointError(f"{what}: take the float model, or a folder whose config.json has a quantization_config")
    with _clear_errors(path, partial(_check_tensors, path, described) if floats else None):
        # Only safetensors: other files may be pickles, which can run code.
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(path, use_safetensors=True, output_loading_info=True, **settings)
    model, info = loaded
    if missing := info["missing_keys"]:
        raise CheckpointError(f"{path} has no {min(missing)}, which {type(model).__name__} needs: it holds another kind of model")
    return model


def _check_tensors(path: Path, described: Mapping[str, Any]) -> None:
    """Raises CheckpointError where the tensors of a float model are not those of the architecture in config.json."""
    if known_architecture(described) is not None:
        plan_model(described, open_floats(path)[1], lambda *_: {})


@contextmanager
def _clear_errors(path: Path, check: Callable[[], object] | None = None) -> Iterator[None]:
    """Turns transformers' errors for an invalid folder into one line; where there is one, that of `check`, which knows the names."""
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    except HalfbyteError:
        raise
    except Exception as e:
        if check is not None:
            check()
        why = f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"
        raise CheckpointError(
            f"transformers cannot load {path} ({why}): its files are damaged, or need another release of transformers"
        ) from e


def ready(model: Any, device: str, dtype: torch.dtype | None = None, sparse: bool | None = None) -> Any:
    """Prepares a model: on the device, computing in `dtype` if given, in evaluation mode, a quantized one with `optimize_`."""
    model = model.to(device)
    if sparse is not None:
        drop_zeros_(model, sparse)
    if dtype is not None:
        _compute_in(model, dtype)
    if any(isinstance(module, QuantModule) for module in model.modules()):
        optimize_(model)
    else:
        attention.use_(model)
        generate_fast(model)
    return model.eval()


def _compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Like model.to(dtype), but buffers keep their dtype: the frequencies of rotary positions must not be rounded."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    for module in model.modules():
        if isinstance(module, QuantModule):
            module.dtype_mark = module.dtype_mark.to(dtype)


def _is_cpu(device: str) -> bool:
    return torch.device(device).type == "cpu"


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the parameters and persistent buffers, each counted once, packed weights as packed."""
    tensors = {t.data_ptr(): t.nbytes for t in model.parameters()}
    tensors |= {m.packed.data.data_ptr(): m.packed.nbytes for m in model.modules() if isinstance(m, QuantModule)}
    return sum(tensors.values())


def peak_memory(device: str) -> int | None:
    """The peak memory of the GPU or of this process; None where the system does not report it."""
    if not _is_cpu(device):
        return torch.cuda.max_memory_allocated()
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), None)
