"""``python benchmarks/models.py ...`` measures whole models of transformers with `attnc.bench.models`."""

import sys

from attnc.bench.models import main

if __name__ == "__main__":
    sys.exit(main())
