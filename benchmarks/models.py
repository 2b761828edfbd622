"""``python benchmarks/models.py ...`` measures whole models of transformers with `measure.models`."""

import sys

from measure.models import main

if __name__ == "__main__":
    sys.exit(main())
