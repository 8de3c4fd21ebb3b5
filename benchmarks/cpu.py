"""halfbyte against its peers on the CPU: `python benchmarks/cpu.py --help`."""

import sys

from halfbyte.bench.cpu import main

if __name__ == "__main__":
    sys.exit(main())
