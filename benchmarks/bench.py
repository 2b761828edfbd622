"""``python benchmarks/bench.py ...`` is ``python -m attnc bench ...``, from a checkout."""

import sys

from attnc.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
