"""``python benchmarks/weights.py ...`` measures statistics of weights with `measure.weights`."""

import sys

from measure.weights import main

if __name__ == "__main__":
    sys.exit(main())
