"""``python benchmarks/scaling.py ...`` measures threads, callers and growth with `measure.scaling`."""

import sys

from measure.scaling import main

if __name__ == "__main__":
    sys.exit(main())
