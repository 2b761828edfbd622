"""``python benchmarks/weights.py ...`` measures statistics of weights with `attnc.bench.statistics`."""

import sys

from attnc.bench.statistics import main

if __name__ == "__main__":
    sys.exit(main())
