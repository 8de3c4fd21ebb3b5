"""Convolutions, halfbyte against its peers: `python benchmarks/conv.py --help`; on a GPU: `--device cuda`."""

import argparse
import sys

if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    chosen, arguments = parser.parse_known_args()
    if chosen.device == "cuda":
        from conv_gpu import main
    else:
        from conv_cpu import main
    sys.exit(main(arguments))
