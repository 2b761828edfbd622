"""``python benchmarks/scaling.py ...`` measures threads, callers and growth with `attnc.bench.scaling`."""

import sys

from attnc.bench.scaling import main

if __name__ == "__main__":
    sys.exit(main())
