"""Limits of the process: threads that cannot be created. (Emulators ignore such limits: not a test of the kernels.)"""

import sys

import pytest

from attnc import _isa

pytestmark = [pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limits are those of Linux"),
              pytest.mark.skipif(not _isa.kernels.openmp(), reason="built without OpenMP")]

LIMITED = """
import os, re, resource
import numpy as np, attnc
from attnc import _isa
random = np.random.default_rng(0)
x, y = random.standard_normal((2, 8, 300, 64), np.float32), random.standard_normal((300, 5000), np.float32)
calls = [lambda n: attnc.attention(x, x, x, out=outputs[0], num_threads=n),
         lambda n: attnc.softmax(y, out=outputs[1], num_threads=n)]
outputs = [np.empty_like(x), np.empty_like(y)]
wanted = [call(1).copy() for call in calls]
{limit}
for _ in range(2):
    for call, one in zip(calls, wanted):
        assert (call(8) == one).all()
try:
    _isa.kernels.fma_peak("float32", 8)
except RuntimeError as error:
    print(error)
"""
NO_MEMORY = r"""
size = 1024 * int(re.search(r"VmSize:\s+(\d+)", open("/proc/self/status").read())[1])
resource.setrlimit(resource.RLIMIT_AS, (size + (24 << 20), resource.RLIM_INFINITY))     # for stacks of 4 MiB or more
"""
NO_PROCESSES = """
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
if os.getuid() == 0:
    os.setuid(65534)                            # the limit does not hold for root
"""


@pytest.mark.parametrize("limit", [NO_MEMORY, NO_PROCESSES], ids=["memory", "processes"])
def test_threads_that_cannot_be_created(python, limit):
    """One thread computes: GNU OpenMP by itself ends the process."""
    assert python(LIMITED.format(limit=limit)) == "the system refuses to create 8 threads"


def test_threads_are_created_again_when_they_can_be(python):
    """After a refusal a thread asks again a second later; what it was granted it does not ask for again."""
    code = LIMITED.format(limit=NO_MEMORY) + """
import time
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
time.sleep(1.1)
before = len(os.listdir("/proc/self/task"))
calls[0](4)
print(len(os.listdir("/proc/self/task")) - before)
"""
    assert python(code).split("\n")[-1] == "3"
