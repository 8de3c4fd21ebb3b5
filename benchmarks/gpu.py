"""halfbyte against its peers on a GPU: `python benchmarks/gpu.py --help`."""

import sys

from halfbyte.bench.gpu import main

if __name__ == "__main__":
    sys.exit(main())
