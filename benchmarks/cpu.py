"""halfbyte against its peers on the CPU: `python benchmarks/cpu.py --help`."""

import sys

from cpu_main import main

if __name__ == "__main__":
    sys.exit(main())
