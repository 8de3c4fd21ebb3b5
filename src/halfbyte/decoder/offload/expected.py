"""What a plan is expected to take: seconds of a token and of a prompt, from bytes and operations over a machine's rates.

    seconds of a part = max(bytes read / bandwidth, operations / operations per second)

The GPU, the CPU and the link work one after the other, but for experts of prompts that cross to the GPU: those of the next layer do while
one computes. Attention between tokens is not counted: it is little of a prompt of some hundred tokens.
"""

from __future__ import annotations

from typing import NamedTuple

from halfbyte.decoder.offload.placement import LayerSize, Plan
from halfbyte.decoder.offload.rates import Rates
from halfbyte.timing import time_text

PROMPT = 512  # tokens, of which `expected` tells the time
_CROSSING = 5e-6  # seconds of a hidden state to the CPU and back, where the GPU waits by a kernel (`crossing.py`)


class Expected(NamedTuple):
    """Expected times of a plan on a machine.

    Attributes:
        rates: Of the machine.
        sequences: That are decoded at the same time.
        gpu_seconds, cpu_seconds, crossing_seconds: Of a token of each sequence, which takes their sum.
        prompt_tokens: Tokens of a prompt that is read at once.
        prompt_seconds: Of this prompt with everything computed where its weights are.
        streamed_seconds: Of this prompt where experts on the CPU cross to the GPU, as they do if it saves time; None: there are none, or no
            memory for their buffers.
    """

    rates: Rates
    sequences: int
    gpu_seconds: float
    cpu_seconds: float
    crossing_seconds: float
    prompt_tokens: int
    prompt_seconds: float
    streamed_seconds: float | None

    @property
    def token_seconds(self) -> float:
        """Seconds of a token of each sequence."""
        return self.gpu_seconds + self.cpu_seconds + self.crossing_seconds

    def to_json(self) -> dict[str, object]:
        """Return what is said as a document of JSON."""
        return {"token_seconds": self.token_seconds, **self._asdict(), "rates": self.rates.to_json()}

    def __str__(self) -> str:
        gpu, cpu, crossing = map(time_text, (self.gpu_seconds, self.cpu_seconds, self.crossing_seconds))
        parts = f" (GPU {gpu}, CPU {cpu}, crossings {crossing})" if self.cpu_seconds else ""
        prompt = f"a prompt of {self.prompt_tokens} tokens: {time_text(self.prompt_seconds)}"
        if self.streamed_seconds is not None:
            prompt += f" with experts computed on the CPU, {time_text(self.streamed_seconds)} where they cross to the GPU"
        token = "a token" if self.sequences == 1 else f"a token of each of {self.sequences} sequences"
        return f"{self.rates}\nexpected of {token}: {time_text(self.token_seconds)}{parts}\nexpected of {prompt}"


def expected(plan: Plan, rates: Rates, sequences: int = 1, prompt_tokens: int = PROMPT) -> Expected:
    """Estimate the times of a plan on a machine."""
    gpu, cpu, crossing = token_seconds(plan, rates, sequences)
    streamed = prompt_seconds(plan, prompt_tokens, rates, streamed=True) if plan.streams else None
    in_place = prompt_seconds(plan, prompt_tokens, rates)
    return Expected(rates, sequences, gpu, cpu, crossing, prompt_tokens, in_place, streamed)


def token_seconds(plan: Plan, rates: Rates, sequences: int = 1) -> tuple[float, float, float]:
    """Estimate the seconds of one new token of each sequence: of the GPU, of the CPU, and of hidden states that cross."""
    gpu, cpu, crossings = plan.sizes.head / rates.gpu_bandwidth, 0.0, int(plan.placement.layers > 0)
    for index, layer in enumerate(plan.sizes.layers):
        rest, experts = plan.placement.on_cpu(index), bool(layer.experts) and plan.placement.on_cpu(index, experts=True)
        crossings += experts and not rest
        times = (
            (rest, _rest_seconds(layer, sequences, rates, cpu=rest)),
            (experts, _experts_seconds(layer, sequences, rates, cpu=experts)),
        )
        gpu += sum(seconds for on_cpu, seconds in times if not on_cpu)
        cpu += sum(seconds for on_cpu, seconds in times if on_cpu)
    return gpu, cpu, crossings * _CROSSING


def prompt_seconds(plan: Plan, tokens: int, rates: Rates, *, streamed: bool = False) -> float:
    """Estimate the seconds of a prompt that is read at once.

    Args:
        plan: What is where.
        tokens: Of the prompt.
        rates: Of the machine.
        streamed: Whether the routed experts on the CPU of layers on the GPU cross to it.
    """
    seconds, overlaps = plan.sizes.head / rates.gpu_bandwidth, False
    for index, layer in enumerate(plan.sizes.layers):
        rest, experts = plan.placement.on_cpu(index), bool(layer.experts) and plan.placement.on_cpu(index, experts=True)
        here = _rest_seconds(layer, tokens, rates, cpu=rest)
        if not (streamed and experts and not rest):
            seconds += here + _experts_seconds(layer, tokens, rates, cpu=experts) + (_CROSSING if experts and not rest else 0.0)
            continue
        computing, link = here + _experts_seconds(layer, tokens, rates, cpu=False), layer.experts / rates.link_bandwidth
        seconds += max(computing, link) if overlaps else computing + link  # the GPU waits for the first experts
        overlaps = True
    return seconds


def _rest_seconds(layer: LayerSize, tokens: int, rates: Rates, *, cpu: bool = False) -> float:
    return _seconds(layer.rest, layer.rest_weights * tokens, rates, cpu=cpu)


def _experts_seconds(layer: LayerSize, tokens: int, rates: Rates, *, cpu: bool = False) -> float:
    """Seconds of the experts of tokens that choose them independently."""
    read = layer.experts * (1 - (1 - layer.active) ** tokens)
    return _seconds(read, layer.expert_weights * layer.active * tokens, rates, cpu=cpu)


def _seconds(nbytes: float, products: float, rates: Rates, *, cpu: bool) -> float:
    if cpu:
        return max(nbytes / rates.cpu_bandwidth, 2 * products / rates.cpu_operations)
    return max(nbytes / rates.gpu_bandwidth, 2 * products / rates.gpu_operations)
