"""halfbyte against its peers on a GPU: `python benchmarks/gpu.py --help`."""

import sys

from gpu_main import main

if __name__ == "__main__":
    sys.exit(main())
