"""One step of a UNet of Stable Diffusion's shape and one decoding by its VAE on a CPU: halfbyte beside torch float32 and OpenVINO int8.

    pip install openvino nncf
    python benchmarks/diffusion.py --latents 32 --width 0.5

Weights are random and not 0. Each contender is timed before the next one's libraries are loaded, then all are interleaved in one process: a
run in which one is slower among the others prints no figures. `--width`: of SD1.5's channels, all of which take 3.4 GB in float32 for each
contender. OpenVINO's int8 is that of nncf.quantize, static, with the model type "transformer" for the UNet.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.machine import machine
from halfbyte.timing import interleave, measure

CHANNELS, VAE_CHANNELS = (320, 640, 1280, 1280), (128, 256, 512, 512)
TEXT, TOKENS = 768, 77
CALIBRATION = 2
SLOWED = 1.5  # times its time before the others were loaded, from which a contender's time is not its own


class Step(nn.Module):
    """A UNet that takes and gives tensors: [1, 4, H, W], [1], [1, 77, 768] -> [1, 4, H, W]."""

    def __init__(self, width: float) -> None:
        from diffusers import UNet2DConditionModel

        super().__init__()
        channels = tuple(round(c * width / 32) * 32 for c in CHANNELS)
        self.unet = UNet2DConditionModel(block_out_channels=channels, cross_attention_dim=TEXT, attention_head_dim=8)

    def forward(self, sample: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        return self.unet(sample, timestep, text, return_dict=False)[0]  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """The decoder of a VAE: [1, 4, H, W] -> [1, 3, 8 H, 8 W]."""

    def __init__(self, width: float) -> None:
        from diffusers import AutoencoderKL

        super().__init__()
        self.vae = AutoencoderKL(
            block_out_channels=tuple(round(c * width / 32) * 32 for c in VAE_CHANNELS),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            latent_channels=4,
            layers_per_block=2,
        )
        self.vae.encoder = nn.Identity()

    def forward(self, latents: Tensor) -> Tensor:
        return self.vae.decode(latents, return_dict=False)[0]  # type: ignore[no-any-return]


def inputs_of(part: str, latents: int, seed: int) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(seed)
    sample = torch.randn(1, 4, latents, latents, generator=random)
    return (sample, torch.tensor([500.0]), torch.randn(1, TOKENS, TEXT, generator=random)) if part == "unet" else (sample,)


def openvino_int8(model: nn.Module, part: str, latents: int, threads: int) -> Callable[[], Tensor]:
    import nncf  # type: ignore[import-not-found]
    import openvino

    example = inputs_of(part, latents, 0)
    converted = openvino.convert_model(model, example_input=example, input=[tuple(x.shape) for x in example])
    data = nncf.Dataset([tuple(x.numpy() for x in inputs_of(part, latents, 1 + i)) for i in range(CALIBRATION)])
    small = nncf.quantize(converted, data, subset_size=CALIBRATION, model_type=nncf.ModelType.TRANSFORMER if part == "unet" else None)
    compiled = openvino.Core().compile_model(small, "CPU", {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"})
    arrays = [x.numpy() for x in example]
    return lambda: torch.from_numpy(compiled(arrays)[0])


def contenders(part: str, args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    torch.manual_seed(0)
    model = (Step if part == "unet" else Decoder)(args.width).eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    example = inputs_of(part, args.latents, 0)
    yield "torch float32", lambda: model(*example)
    for name, config in {
        "halfbyte int8": hb.Config("int8_channel", compute="int8"),
        "halfbyte int8, a scale per image": hb.Config("int8_channel", activation="image"),
        "halfbyte q8_0": hb.Config("q8_0"),
    }.items():
        if name in args.only:
            small = hb.optimize_(hb.quantize_(copy.deepcopy(model), config))
            yield name, partial(small, *example)
    if "openvino" in args.only:
        yield "OpenVINO int8", openvino_int8(model, part, args.latents, torch.get_num_threads())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["unet", "vae"], choices=("unet", "vae"))
    parser.add_argument("--latents", type=int, default=32, help="side of the latents (default: %(default)s)")
    parser.add_argument("--width", type=float, default=0.5, help="of the published channels (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", default=["halfbyte int8", "halfbyte int8, a scale per image", "openvino"])
    parser.add_argument("--profile", action="store_true", help="print what halfbyte's first contender spends its time on instead")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    hb.keep_freed_memory()  # for all contenders alike
    rows = []
    for part in args.parts:
        with torch.inference_mode():
            calls, alone = dict[str, Callable[[], Tensor]](), dict[str, float]()
            for name, call in contenders(part, args):  # timed before the next one loads its libraries
                calls[name], alone[name] = call, measure(call, min_runs=3).median
            exact = calls["torch float32"]()
            errors = {name: float((call() - exact).norm() / exact.norm()) for name, call in calls.items()}
            if args.profile:
                call = list(calls.values())[1]
                with torch.profiler.profile() as profile:
                    call()
                print(profile.key_averages(group_by_input_shape=False).table(sort_by="self_cpu_time_total", row_limit=30))
                continue
            times = interleave(calls, rounds=args.rounds)
        if slowed := [f"{n}: {alone[n] * 1e3:.0f} -> {times[n].median * 1e3:.0f} ms" for n in calls if times[n].median > SLOWED * alone[n]]:
            raise SystemExit(f"{part}: contenders slow each other down, so no ratio of this run means anything ({'; '.join(slowed)})")
        for name, error in errors.items():
            row: dict[str, object] = {"part": part, "contender": name, "ms": round(times[name].median * 1e3, 1), "error": round(error, 4)}
            row["alone_ms"] = round(alone[name] * 1e3, 1)
            row["speedup"] = round(times["torch float32"].median / times[name].median, 2)
            rows.append(row)
            print(json.dumps(row), flush=True)
    print(f"{machine().cpu}, {torch.get_num_threads()} threads, torch {torch.__version__}, halfbyte {hb.__version__}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
