"""`DecoderModel`: what `CpuModel` (lower_cpu.py) and `GpuModel` (lower_gpu.py) have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from halfbyte.decoder.cache import Cache, OnGpu
from halfbyte.decoder.offload.placement import Plan
from halfbyte.decoder.spec import DecoderSpec
from halfbyte.errors import ArgumentError


class DecoderModel(ABC):
    """A decoder that is ready to compute on a device. Its weights must not change.

    Attributes:
        spec: The specification, with the weights.
        where: What `Cache` needs to know of the GPU; None: the model computes on a CPU.
        plan: Which layers and experts are on the CPU, where the model computes on a GPU; None: none.
        notes: Which ops torch computes, as the device has no kernel for them, and why.
        most_decode: Maximum number of sequences of `decode`.
        most_verify: Maximum number of tokens of `verify`.
        least_prefill: Minimum number of tokens of `prefill` where the cache has others of the sequence: with fewer the logits of a prompt
            would depend on the parts that it is read in.
        most_prompts: Maximum number of prompts that are prefilled as one batch.
        prefill_chunk: Tokens of prompts after which `Batch` decodes other sequences again.
        streams_experts: Whether experts that are on the CPU are copied to the GPU for long prompts.
    """

    spec: DecoderSpec
    where: OnGpu | None = None
    plan: Plan | None = None
    notes: tuple[str, ...] = ()
    most_decode: int
    most_verify: int
    least_prefill: int
    most_prompts: int
    prefill_chunk: int

    @property
    def streams_experts(self) -> bool:
        return False

    @abstractmethod
    def decode(self, ids: Sequence[int], cache: Cache, positions: Sequence[int] | None = None) -> Tensor:
        """Compute the logits [B, N], float32 on the model's device, after one new token of each sequence, which enters the cache.

        Args:
            ids: A token for each sequence.
            cache: Of the tokens before.
            positions: Of the tokens; None: those that follow in the cache.
        """

    @abstractmethod
    def prefill(self, ids: Sequence[int], cache: Cache, *, every: bool = False, total: int | None = None) -> Tensor:
        """Read tokens of one sequence, which enter the cache.

        Args:
            ids: The tokens, at least one.
            cache: Of the tokens before, of one sequence.
            every: Compute the logits of every token, not of the last one.
            total: Length of the whole sequence, which decides between short and long frequencies ("longrope"); None: with these tokens.

        Returns:
            The logits after the last token [N], float32 on the model's device; or after every token [t, N].
        """

    @abstractmethod
    def verify(self, ids: Sequence[int], cache: Cache) -> Tensor:
        """Compute the logits [t, N] after every one of several tokens of one sequence, which enter the cache.

        On a CPU they are those of as many calls of `decode`, bit by bit; on a GPU kernels of several rows round sums otherwise.

        Args:
            ids: The tokens, `most_verify` at most: the newest one and guesses of those that follow.
            cache: Of the tokens before, of one sequence.
        """

    def _check_decode(self, ids: Sequence[int], cache: Cache) -> None:
        if len(ids) != cache.batch or len(ids) > self.most_decode:
            raise ArgumentError(
                f"one token is decoded for each of the cache's {cache.batch} sequences, {self.most_decode} at most, got {len(ids)}"
            )

    def _check_prompt(self, ids: Sequence[int], cache: Cache) -> None:
        if cache.batch != 1 or not ids:
            raise ArgumentError(f"a prompt of at least one token is read into the cache of one sequence, got {len(ids)} and {cache.batch}")
        self._check_ids(ids)

    def _check_ids(self, ids: Sequence[int]) -> None:
        if min(ids) < 0 or max(ids) >= self.spec.vocabulary:
            raise ArgumentError(f"token ids lie in 0 … {self.spec.vocabulary - 1}, got {min(ids)} … {max(ids)}")
