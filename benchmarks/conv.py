"""Convolutions on the CPU, halfbyte against its peers: `python benchmarks/conv.py --help`."""

import sys

from halfbyte.bench.conv import main

if __name__ == "__main__":
    sys.exit(main())
