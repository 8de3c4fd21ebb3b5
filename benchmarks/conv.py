"""Convolutions, halfbyte against its peers: `python benchmarks/conv.py --help`; on a GPU: `--device cuda`."""

import sys

if __name__ == "__main__":
    arguments = sys.argv[1:]
    if "--device" in arguments:
        at = arguments.index("--device")
        device = arguments[at + 1 : at + 2]
        del arguments[at : at + 2]
        if device == ["cuda"]:
            from halfbyte.bench.conv_gpu import main as main_gpu

            sys.exit(main_gpu(arguments))
        if device != ["cpu"]:
            sys.exit(f"--device is cpu or cuda, got {' '.join(device) or 'nothing'}")
    from halfbyte.bench.conv import main

    sys.exit(main(arguments))
