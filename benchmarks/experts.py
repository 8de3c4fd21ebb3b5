"""Linear layers of experts on this GPU against bfloat16 weights in torch: `python benchmarks/experts.py [--every-config]`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from halfbyte.bench.experts import SHAPES, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--formats", nargs="+", default=["q4_0", "int4_g128"])
    parser.add_argument("--m", type=int, nargs="+", default=[1, 8, 64, 512, 4096], help="tokens")
    parser.add_argument("--every-config", action="store_true", help="time all configs of halfbyte's kernel, not the first alone")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = []
    for shape in args.shapes:
        for i, name in enumerate(args.formats):
            found += measure(shape, name, args.m, every_config=args.every_config, peers=i == 0)
    for one in found:
        time = f"{one.seconds * 1e6:8.1f} us  {one.floor / one.seconds:5.2f} of reading"
        print(f"{one.shape:14} {one.format:10} M={one.m:<4} {time}  {one.contender}")
    if args.json:
        args.json.write_text(json.dumps([asdict(one) for one in found], indent=1))


if __name__ == "__main__":
    main()
