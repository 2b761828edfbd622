"""Count the instructions of five small calls in the avx2 kernels, and compare them with the committed counts.

    python benchmarks/instructions.py            # exit 1 if a count rose or fell by more than 3 %
    python benchmarks/instructions.py --write    # make the counts anew

valgrind's callgrind gives the same count every time, whatever else the machine is doing. Counts of another compiler
say nothing, so they are not compared. A call is counted as the difference of two processes, one of which makes more.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

RESULT = Path(__file__).resolve().parent / "results" / "instructions.json"
TOLERANCE = 0.03
FEW, MANY = 10, 50      # calls of the two processes; from 1 to 5 Python still adapts: 68,000 or 80,000 of "tiny"
PREPARE = """
import numpy as np
from attnc import attention, softmax
random = np.random.default_rng(0)
def arrays(q_heads, kv_heads, q_len, kv_len, dim):
    shapes = (q_heads, q_len, dim), (kv_heads, kv_len, dim), (kv_heads, kv_len, dim)
    return [random.standard_normal(shape, np.float32) for shape in shapes]
"""
CASES = {       # name: what is prepared, what is called
    "prefill 4,256,256,64 causal": ("a = arrays(4, 4, 256, 256, 64)", "attention(*a, causal=True, num_threads=1)"),
    "decode 8/2,1,1024,64": ("a = arrays(8, 2, 1, 1024, 64)", "attention(*a, num_threads=1)"),
    "tiny 4,16,16,32": ("a = arrays(4, 4, 16, 16, 32)", "attention(*a, num_threads=1)"),
    "weights 2,128,128,64": ("a = arrays(2, 2, 128, 128, 64)", "attention(*a, want='weights', num_threads=1)"),
    "softmax 256,512": ("x = random.standard_normal((256, 512), np.float32); out = np.empty_like(x)",
                        "softmax(x, out=out, num_threads=1)"),
}


def total(prepare: str, call: str, times: int) -> int:
    """Instructions of a process that makes the call `times` times."""
    with tempfile.TemporaryDirectory() as folder:
        code = f"{PREPARE}\n{prepare}\nfor _ in range({times}): {call}"
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out", sys.executable, "-c", code]
        environment = os.environ | {"ATTNC_ISA": "avx2", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1",
                                    "OPENBLAS_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    found = re.search(r"Collected\s*:\s*(\d+)", done.stderr)
    if done.returncode or not found:
        raise RuntimeError(f"valgrind failed:\n{done.stderr[-2000:]}")
    return int(found[1])


def count() -> dict[str, int]:
    """Instructions of one call of each case."""
    return {name: (total(*case, MANY) - total(*case, FEW)) // (MANY - FEW) for name, case in CASES.items()}


def compare(old: dict, new: dict) -> list[str]:
    """The cases whose count moved by more than the tolerance."""
    return [f"{name}: {old[name]:,} instructions, now {now:,} ({now / old[name] - 1:+.1%})"
            for name, now in new.items() if name in old and abs(now / old[name] - 1) > TOLERANCE]


def main() -> int:
    from attnc import _cpu

    if shutil.which("valgrind") is None:
        print("instructions are not counted: valgrind is not installed")
        return 0
    old = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {"compiler": None, "counts": {}}
    if "--write" not in sys.argv and old["compiler"] != _cpu.COMPILER:
        print(f"instructions are not compared: they were counted with {old['compiler']}, this is {_cpu.COMPILER}")
        return 0
    counts = count()
    for name, value in counts.items():
        print(f"{name}: {value:,} instructions")
    if "--write" in sys.argv:
        RESULT.write_text(json.dumps({"compiler": _cpu.COMPILER, "counts": counts}, indent=1) + "\n", encoding="utf-8")
        return 0
    moved = compare(old["counts"], counts)
    print(*(f"FAIL {line}" for line in moved), sep="\n", end="\n" if moved else "")
    return 1 if moved else 0


if __name__ == "__main__":
    sys.exit(main())
