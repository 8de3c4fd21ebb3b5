"""`LanguageModel`: a causal language model of any checkpoint that halfbyte reads, without transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from halfbyte.checkpoint.files import has_adapter
from halfbyte.decoder.build import build_spec
from halfbyte.decoder.cache import Cache
from halfbyte.decoder.lower_cpu import CpuModel, DecoderModel
from halfbyte.decoder.offload.placement import Plan, Request, make_request, plan_of
from halfbyte.decoder.spec import DecoderSpec
from halfbyte.errors import ArgumentError, CheckpointError, UnsupportedError, model_path, not_there
from halfbyte.formats.spec import Format
from halfbyte.io.files import is_file, is_there
from halfbyte.io.gguf import File, is_gguf, read_header
from halfbyte.language.chat_template import render
from halfbyte.language.checkpoint_tensors import open_checkpoint
from halfbyte.language.device import find_device, find_gpu, fitting, free_memory, no_memory_to_run
from halfbyte.language.generate import MOST_GUESSES, Batch, Generation, run, steps
from halfbyte.language.report import LanguageReport, Times, in_words
from halfbyte.language.sampling.sampler import Sampling
from halfbyte.language.tokenizer import Tokenizer
from halfbyte.memory import size_text
from halfbyte.quantizers import CALIBRATED, METHODS

if TYPE_CHECKING:
    from halfbyte.decoder.explain import Explanation
    from halfbyte.nn.config import Config

Message = Mapping[str, object]
_Device = torch.device | str | Mapping[str, object]
_DRAFT_GUESSES = 8  # tokens that a draft model guesses at a time, by default
_RESERVE = 20  # memory="auto" leaves 1/20 of a GPU's free memory to CUDA: modules of kernels, fragmentation


class LanguageModel:
    """A causal language model on the CPU or on a GPU.

    Attributes:
        spec: What is computed, with the weights.
        tokenizer: Its tokenizer.
        path: Where it was opened.
        plan: What is on the CPU, the rest on a GPU, and the bytes of both; None: all is on one device.

    Example:
        model = LanguageModel.open("SmolLM2-135M-Instruct.gguf")
        print(model.generate("The list method append").text)
        for piece in model.stream([{"role": "user", "content": "What is a nibble?"}]):
            print(piece, end="", flush=True)
    """

    def __init__(
        self,
        spec: DecoderSpec,
        tokenizer: Tokenizer,
        path: Path,
        *,
        int8_cache: bool = False,
        speculate: int | None = None,
        draft: LanguageModel | None = None,
        dtype: torch.dtype = torch.float16,
        plan: Plan | None = None,
        in_floating_point: Sequence[str] = (),
    ) -> None:
        """Make a model of a specification; `LanguageModel.open` reads one from a checkpoint. Its weights' device computes, a GPU with
        activations of `dtype`, and for what a plan leaves there the CPU. `in_floating_point`: as in `LanguageReport`."""
        self.spec, self.tokenizer, self.path, self.plan, self._in_floating_point = spec, tokenizer, path, plan, tuple(in_floating_point)
        self._model, self._int8, self._times = _lowered(spec, dtype, plan), int8_cache, Times()
        self._set_speculation(speculate, draft)

    @classmethod
    def open(
        cls,
        path: str | PathLike[str],
        *,
        format: Config | Format | str | None = None,
        cache: str | None = None,
        speculate: int | None = None,
        draft: str | PathLike[str] | LanguageModel | None = None,
        sparse: bool | None = None,
        device: _Device = "cpu",
        dtype: torch.dtype | None = None,
        memory: int | str | None = None,
        context: int | None = None,
        sequences: int = 1,
        prefix_bytes: int = 0,
    ) -> LanguageModel:
        """Open a model.

        Args:
            path: A halfbyte folder, a GGUF file, or a Hugging Face folder, quantized by AWQ, GPTQ or compressed-tensors or in floating
                point, which needs a `format`.
            format: Quantize a model in floating point to this format, or as a Config says, while it is read.
            cache: "int8" keeps keys and values in 8 bits; None: in the type of activations.
            speculate: Tokens that are guessed at a time, at most, by the draft model or from the text so far (prompt lookup), while a
                sequence runs alone. On a CPU, where 7 at most are checked at a time, the tokens stay the same, greedy or sampled; on a GPU
                they may differ where others are as likely up to rounding. 0: none; None: 8 with a draft model, else none.
            draft: A smaller model with the same vocabulary, which guesses: an open one, or the path of one, which is opened with the same
                `format`, `cache`, `sparse`, `device` and `dtype`.
            sparse: Whether zeros of 2:4 sparse weights are left out; None: on a CPU, where there are kernels for that.
            device: "cpu", "cuda", "cuda:1", …, or "auto": a GPU where there is one that the kernels are for. Or a GPU with a part of the
                model on the CPU: {"experts": "cpu"} for all routed experts, {"cpu_experts": 12} for those of the first 12 layers, and
                "gpu" for which GPU.
            dtype: Of activations on a GPU, torch.float16, torch.bfloat16 or torch.float32; None: the 16-bit type that the checkpoint
                names, or else bfloat16. A CPU computes in float32.
            memory: Of the GPU: bytes, a text such as "12 GB", or "auto" for what is free. As much of the model as fits is there, with a
                cache for `context` tokens, and the rest on the CPU; see `plan`.
            context: Tokens of a sequence, at most, where `memory` is given; None: 8192, or what the model has positions for.
            sequences: That are decoded at the same time, at most, where `memory` is given.
            prefix_bytes: As of `batch`, at most, where `memory` is given.

        Raises:
            UnsupportedError: Its architecture, or a part of it, is not supported without transformers: `halfbyte.load` may read it.
            CheckpointError: It is damaged, incomplete or has no tokenizer.
            ArgumentError: A setting is out of its range.
        """
        source = model_path(path)
        if cache not in (None, "int8"):
            raise ArgumentError(f"the KV cache is 'int8' or None, for the type of activations, got cache={cache!r}")
        _check_speculation(speculate, draft)
        target, request = _request(device, memory, context, sequences, int8=cache == "int8", prefix_bytes=prefix_bytes)
        if request is not None and draft is not None:
            raise ArgumentError("a draft model takes GPU memory that is not planned for: leave out draft, or memory and what is on the CPU")

        def build() -> LanguageModel:
            opened = open_spec(source, format=format, sparse=sparse, device=target, dtype=dtype, request=request)
            tokenizer = Tokenizer.open(source, opened.header)
            try:
                settings: dict[str, Any] = {"dtype": opened.dtype, "plan": opened.plan, "in_floating_point": opened.in_floating_point}
                return cls(opened.spec, tokenizer, source, int8_cache=cache == "int8", **settings)
            except ArgumentError as e:
                raise CheckpointError(f"the tensors of {source} do not fit together: {e}") from e

        model = fitting(build, find_device(target), partial(_does_not_fit, source, target, is_planned=request is not None))
        if draft is not None and not isinstance(draft, LanguageModel):
            try:
                draft = cls.open(draft, format=format, cache=cache, sparse=sparse, device=target, dtype=dtype)
            except UnsupportedError as e:
                raise ArgumentError(f"the draft model cannot be opened ({e}): quantize it first, or leave it out") from e
        model._set_speculation(speculate, draft)
        return model

    def _set_speculation(self, speculate: int | None, draft: LanguageModel | None) -> None:
        _check_speculation(speculate, draft)
        if draft is not None and not draft.tokenizer.has_vocabulary_of(self.tokenizer):
            raise ArgumentError(
                f"a draft model has the vocabulary of the model, got {draft.path} with another one than {self.path}: "
                "use a smaller model of the same family"
            )
        self._draft = None if draft is None else draft._model
        self._speculate = (0 if draft is None else _DRAFT_GUESSES) if speculate is None else speculate
        self._batch = self.batch(1)

    def batch(self, slots: int | None = None, *, prefix_bytes: int = 0) -> Batch:
        """Make a batch of sequences that join and leave while others run.

        Args:
            slots: Sequences that are decoded at the same time, at most; None: 16, or `most_sequences` if that is less.
            prefix_bytes: Bytes of KV caches of earlier sequences that stay for prompts with the same beginning; 0: of the last sequence
                that ran alone.
        """
        slots = min(16, self.most_sequences) if slots is None else slots
        if self.plan is not None and prefix_bytes > self.plan.request.prefix_bytes:
            planned = size_text(self.plan.request.prefix_bytes)
            raise ArgumentError(
                f"{planned} are planned for KV caches of earlier sequences, got prefix_bytes={prefix_bytes}: open the model with as many"
            )
        return Batch(
            self._model,
            self.tokenizer,
            slots=slots,
            int8_cache=self._int8,
            speculate=self._speculate,
            draft=self._draft,
            prefix_bytes=prefix_bytes,
            times=self._times,
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Which ops are computed by torch's operations on a GPU, as there is no kernel for them, and why; and which linear layers are
        computed in floating point."""
        return (*in_words(self._in_floating_point), *self._model.notes)

    @property
    def most_sequences(self) -> int:
        """Sequences that can be decoded at the same time."""
        return self._model.most_decode

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[Message] | Sequence[str | Sequence[int] | Sequence[Message]],
        sampling: Sampling | None = None,
        **settings: object,
    ) -> Any:
        """Generate the continuation of a prompt, or of several at the same time.

        Args:
            prompts: A text, token ids, the messages of a chat, or a list of these.
            sampling: How tokens are chosen; or its fields as keywords: max_new_tokens, temperature, top_k, top_p, seed, stop, …

        Returns:
            A `Generation`, or one for each of a list of prompts.

        Raises:
            ArgumentError: A prompt is empty or too long, or a setting is out of its range.
        """
        chosen = _sampling(sampling, settings)
        if _is_several(prompts):
            several = [(self._ids(prompt), _is_chat(prompt)) for prompt in prompts]
            self._batch.free()
            batch = self.batch(min(len(several), self.most_sequences))
            generations = [batch.submit(ids, chosen, is_chat=is_chat) for ids, is_chat in several]
            for _ in steps(batch, generations):
                pass
            return generations
        generation = self._batch.submit(self._ids(prompts), chosen, is_chat=_is_chat(prompts))
        for _ in steps(self._batch, [generation]):
            pass
        return generation

    def stream(
        self, prompt: str | Sequence[int] | Sequence[Message], sampling: Sampling | None = None, **settings: object
    ) -> Iterator[str]:
        """Generate the continuation of a prompt piece by piece, in whole characters.

        Args:
            prompt: A text, token ids, or the messages of a chat.
            sampling: As for `generate`.

        Yields:
            New text. Closing the iterator cancels the generation.
        """
        yield from self.stream_of(self.submit(prompt, sampling, **settings))

    def submit(self, prompt: str | Sequence[int] | Sequence[Message], sampling: Sampling | None = None, **settings: object) -> Generation:
        """Prepare a generation for `stream_of`; the same arguments as `stream`."""
        return self._batch.submit(self._ids(prompt), _sampling(sampling, settings), is_chat=_is_chat(prompt))

    def stream_of(self, generation: Generation) -> Iterator[str]:
        """Generate the text of one generation that `submit` has prepared, piece by piece."""
        for _, piece in run(self._batch, [generation]):
            yield piece

    def logits(self, ids: Sequence[int], *, int8_cache: bool | None = None) -> Tensor:
        """Compute the logits after every token of a text, [t, N] float32, on the model's device.

        Args:
            ids: The tokens.
            int8_cache: Whether keys and values are kept in 8 bits; None: as the model was opened.
        """
        int8, given, device = self._int8 if int8_cache is None else int8_cache, list(ids), self.spec.embedding.device
        if self.plan is not None and len(given) > self.plan.request.context:
            raise ArgumentError(
                f"this model's memory is planned for {self.plan.request.context} tokens, got {len(given)}: open it with a larger context"
            )

        def compute() -> Tensor:
            return self._model.prefill(given, Cache(self.spec, int8=int8, most=len(given), where=self._model.where), every=True)

        return fitting(compute, device, partial(no_memory_to_run, device, f"the logits of {len(given)} tokens"))

    def report(self) -> LanguageReport:
        """Tell what was measured: the rates of the machine and the times of what this model has generated, next to those expected of its
        plan.

        Example:
            model = LanguageModel.open("Qwen3-30B-A3B-Q4_K_M.gguf", memory="12 GB")
            model.generate("What is a nibble?")
            print(model.report())
        """
        if self.plan is None:
            return LanguageReport(replace(self._times), in_floating_point=self._in_floating_point)
        from halfbyte.decoder.offload.expected import expected
        from halfbyte.decoder.offload.rates import rates_of

        expectation = expected(self.plan, rates_of(self.spec.embedding.device))
        return LanguageReport(replace(self._times), self.plan, expectation, self._in_floating_point)

    def explain(self, device: torch.device | str | None = None, rows: int = 1, *, dtype: torch.dtype | None = None) -> Explanation:
        """Say which kernels decode one new token of each of several sequences: the model's program, op by op.

        Args:
            device: "cpu", "cuda", "cuda:1", … or the architecture of a GPU that is not here, such as "sm_90"; None: where the model is.
            rows: Number of sequences.
            dtype: Of activations; None: float32 on a CPU, the only one there, and bfloat16 on a GPU.

        Returns:
            An explanation that prints as a table; `to_json()` has the same as a document.

        Raises:
            ArgumentError: The device decodes no such number of sequences at the same time.
            UnsupportedError: The device is unknown, or a part of the model has no kernel there.

        Example:
            model = LanguageModel.open("SmolLM2-135M-Instruct.gguf")
            print(model.explain())
            print(model.explain("sm_90", rows=16))
        """
        from halfbyte.decoder.explain import explain_decoder

        return explain_decoder(self.spec, device, rows, dtype, None if self.plan is None or device == "cpu" else self.plan.request)

    def chat_prompt(self, messages: Sequence[Message], **variables: object) -> str:
        """Render the messages of a chat with the model's chat template.

        Raises:
            UnsupportedError: The model has no chat template.
            CheckpointError: The template fails, or refuses the messages.
        """
        templates = self.tokenizer.chat_templates
        template = templates.get("tool_use" if variables.get("tools") and "tool_use" in templates else "default")
        if template is None:
            raise UnsupportedError(f"the tokenizer of {self.path} has no chat template: write the prompt as a text")
        settings: dict[str, Any] = {**self.tokenizer.special_tokens, **variables}
        return render(template, messages, **settings)

    def _ids(self, prompt: object) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        values: list[Any] = list(prompt) if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray) else [None]
        if _is_chat(values):
            return self.tokenizer.encode(self.chat_prompt(values), add_special_tokens=False)
        if not all(type(value) is int for value in values):
            raise ArgumentError(f"a prompt is a text, token ids or messages, got {type(prompt).__name__}: pass one of these")
        return values


class Opened(NamedTuple):
    """What a checkpoint says of a model.

    Attributes:
        spec: The specification, with packed weights.
        dtype: Of activations.
        header: Of a GGUF file, or None.
        plan: What is on the CPU, the rest on a GPU, where that was asked for.
        in_floating_point: As in `LanguageReport`.
    """

    spec: DecoderSpec
    dtype: torch.dtype
    header: File | None
    plan: Plan | None = None
    in_floating_point: tuple[str, ...] = ()


def open_spec(
    path: str | PathLike[str],
    *,
    format: Config | Format | str | None = None,
    sparse: bool | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    request: Request | None = None,
) -> Opened:
    """Open the specification of a model.

    Args:
        path, format, sparse, device, dtype: As for `LanguageModel.open`.
        request: For the part of it that is packed for the CPU, where the device is a GPU.

    Raises:
        UnsupportedError: Its architecture, or a part of it, is not supported without transformers.
        CheckpointError: It is damaged or incomplete.
        ArgumentError: The device does not have this dtype.
    """
    source, device = model_path(path), find_device(device)
    if request is None and dtype not in (
        (None, torch.float32) if device.type == "cpu" else (None, torch.float16, torch.bfloat16, torch.float32)
    ):
        allowed = "float32" if device.type == "cpu" else "float16, bfloat16 or float32"
        raise ArgumentError(f"activations on {device} are {allowed}, got dtype={dtype}: leave it out")
    if not is_there(source):
        raise not_there(source, "a Hugging Face folder, a halfbyte folder or a .gguf file")
    if has_adapter(source):
        raise UnsupportedError(f"{source} holds an adapter next to the model: merge it first")
    quantize = None
    if format is not None:
        from halfbyte.nn.config import as_config

        quantize = as_config(format)
        if quantize.method in CALIBRATED:
            raise ArgumentError(
                f"{quantize.method} needs a calibration text, and a model is opened without one: use {', '.join(METHODS)}, "
                f"or halfbyte quantize --method {quantize.method} first"
            )
    header = read_header(source) if is_file(source) and is_gguf(source) else None
    offloads, plan = request is not None, None
    config, tensors = open_checkpoint(source, quantize, header, sparse=sparse, device=device, dtype=dtype, offloads=offloads)
    if request is not None:
        plan = plan_of(build_spec(config, tensors.sized()), request, tensors.dtype)
        tensors.placement = plan.placement
    try:
        spec = build_spec(config, tensors)
        for layer in spec.layers:
            layer.check()
    except ArgumentError as e:
        raise CheckpointError(f"the tensors of {source} do not fit together: {e}") from e
    tensors.store()
    spec = spec if plan is None else replace(spec, max_positions=plan.request.context)
    return Opened(spec, tensors.dtype, header, plan, tuple(sorted(tensors.in_floating_point)))


def _does_not_fit(source: Path, device: torch.device | str, free: str, *, is_planned: bool) -> ArgumentError:
    remedy = "give it less memory" if is_planned else "give memory='auto', which leaves a part of it on the CPU"
    return ArgumentError(f"{source} does not fit into the {free} that is free on {device}: {remedy}")


def _check_speculation(speculate: int | None, draft: object) -> None:
    if speculate is not None and (isinstance(speculate, bool) or not isinstance(speculate, int) or not 0 <= speculate <= MOST_GUESSES):
        raise ArgumentError(f"0 to {MOST_GUESSES} tokens are guessed at a time, got speculate={speculate!r}")
    if draft is not None and speculate == 0:
        raise ArgumentError("a draft model guesses at least one token at a time, got speculate=0: pass speculate=8, or no draft")


def _lowered(spec: DecoderSpec, dtype: torch.dtype, plan: Plan | None) -> DecoderModel:
    if spec.embedding.device.type == "cpu" and plan is None:
        return CpuModel(spec)
    from halfbyte.decoder.lower_gpu import GpuModel

    return GpuModel(spec, spec.embedding.device, dtype, plan)


def _request(
    device: _Device, memory: int | str | None, context: int | None, sequences: int, *, int8: bool, prefix_bytes: int
) -> tuple[torch.device | str, Request | None]:
    """Check what was asked for of the device and of a part on the CPU.

    Returns:
        The device, and how the model is to be split between CPU and GPU; None where it is on one device.

    Raises:
        ArgumentError: The GPU has less free memory, or a setting has no effect without memory.
    """
    if not isinstance(device, Mapping) and memory is None:
        if context is not None:
            raise ArgumentError(f"context bounds the KV cache of a model that is given GPU memory, got context={context} without memory")
        return device, None
    gpu, request = make_request(device, memory, context, sequences, int8=int8, prefix_bytes=prefix_bytes)
    gpu = find_gpu(gpu)
    free = free_memory(gpu)
    if free is not None and (request.memory or 0) > free:
        raise ArgumentError(f"{gpu} has {size_text(free)} of free memory, got memory={memory!r}: give it less, or 'auto' for all of it")
    automatic = None if free is None else free - free // _RESERVE
    return gpu, request._replace(memory=request.memory or automatic)


def _is_several(prompts: object) -> bool:
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        return False
    return bool(prompts) and all(isinstance(prompt, Sequence) for prompt in prompts)


def _is_chat(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(message, Mapping) for message in prompt)


def _sampling(sampling: Sampling | None, settings: Mapping[str, Any]) -> Sampling:
    if sampling is not None and settings:
        raise ArgumentError(f"sampling is given, and {', '.join(settings)} in addition: put them into it")
    try:
        return sampling or Sampling(**settings)
    except TypeError as e:
        names = ", ".join(Sampling.__dataclass_fields__)
        raise ArgumentError(f"the settings of sampling are {names}, got {', '.join(settings)}") from e
