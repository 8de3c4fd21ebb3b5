"""The process of one contender of the convolution benchmark: `halfbyte.bench.worker` that also answers

{"do": "convolve", "name": …, "layer": {…}, "min_time": …}      -> seconds a convolution, idle; the first time error, allowed
{"do": "infer", "name": …, "network": {…}, "min_time": …}       -> seconds a batch of images, and so on
"""

from __future__ import annotations

from typing import Any

from conv_contenders import CONTENDERS, Layer, Ready
from conv_networks import CONTENDERS as NETWORK_CONTENDERS
from conv_networks import Inference

from halfbyte import timing
from halfbyte.bench.worker import Bench, serve, wait_until_idle
from halfbyte.memory import keep_freed_memory


class ConvBench(Bench):
    def __init__(self) -> None:
        super().__init__()
        self.convolutions: dict[tuple[str, Layer], Ready] = {}
        self.networks: dict[tuple[str, Inference], Ready] = {}

    def convolve(self, name: str, layer: dict[str, int], min_time: float) -> dict[str, Any]:
        work = Layer(**layer)
        ready = self.convolutions.get((name, work))
        checked = {}
        if ready is None:
            ready = self.convolutions[name, work] = CONTENDERS[name](work)
            checked = {"error": float((ready.result().double() - work.wanted).abs().max()), "allowed": ready.error}
        taken = timing.measure(ready.run, min_time=min_time, min_runs=3, warmup=3)
        return {"seconds": taken.median, "idle": wait_until_idle(), **checked}

    def infer(self, name: str, network: dict[str, Any], min_time: float) -> dict[str, Any]:
        keep_freed_memory()  # for all contenders alike
        work = Inference(**network)
        ready = self.networks.get((name, work))
        checked = {}
        if ready is None:
            ready = self.networks[name, work] = NETWORK_CONTENDERS[name](work)
            checked = {"error": work.error(ready.result()), "allowed": ready.error}
        taken = timing.measure(ready.run, min_time=min_time, min_runs=3, warmup=1)
        return {"seconds": taken.median, "idle": wait_until_idle(), **checked}


if __name__ == "__main__":
    serve(ConvBench())
