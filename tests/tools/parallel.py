"""Run the tests with each of them in several Python threads at the same time (pytest-run-parallel).

    python tests/tools/parallel.py [arguments of pytest]

Left out, for make test has them, is what must be alone: tests that change, count or measure something of the whole
process, and those that start processes. What threads share is the same code in every instruction set: one is enough.
"""

import sys

import pytest

from attnc import _isa

THREADS = 4
ALONE = ("attnc.set_num_threads", "attnc.threads", "checking.plans", "_isa.kernels.refuse_memory",     # change
         "doctest.testmod", "doctest.DocTestRunner",
         "sys.getrefcount", "test_memory.resident",                                                    # count
         "build_tree.run", "subprocess.run", "os.fork")                                                # start a process
FIXTURES = ("python", "alone", "sdist", "wheel", "closed")        # the same; pyplot has one state
MEASURE = "*/test_bench*"


class OneSet:
    """Keeps the tests of one instruction set, and those of none."""

    def pytest_collection_modifyitems(self, items):
        best = _isa.available()[0]
        items[:] = [item for item in items if not hasattr(item, "callspec") or {
            item.callspec.params.get(name, best) for name in ("isa", "api")} <= {best, "reference"}]


def main(*arguments: str) -> int:
    return pytest.main([f"--parallel-threads={THREADS}", "--skip-thread-unsafe=True", "-q", "-p", "no:cacheprovider",
                        "-o", "thread_unsafe_functions=" + "\n".join(ALONE),
                        "-o", "thread_unsafe_fixtures=" + "\n".join(FIXTURES), f"--ignore-glob={MEASURE}", *arguments],
                       plugins=[OneSet()])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
