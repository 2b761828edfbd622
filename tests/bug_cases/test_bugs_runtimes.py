"""Bug cases on OpenMP, other libraries in the process, what an import changes, and the cache's length."""

import ctypes
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from bug_checks import F32, assert_same_bytes, check, qkv

import attnc
from attnc import _isa, reference

OTHERS = ("scipy.special", "sklearn.cluster", "torch", "onnxruntime")
BESIDE = """
import importlib, sys
{imports}
import numpy as np
from bug_checks import qkv, assert_same_bytes
arrays = qkv(43, (2, 4), 64, 300, 16)
def theirs():
    if {other!r} == "torch":
        x = importlib.import_module("torch").ones(400, 400)
        assert (x @ x)[0, 0] == 400
    elif {other!r} == "sklearn.cluster":
        kmeans = importlib.import_module("sklearn.cluster").KMeans(2, n_init=1, random_state=0)
        assert len(set(kmeans.fit(np.repeat([[0.0], [9.0]], 3000, 0)).labels_)) == 2
theirs()
first = attnc.attention(*arrays, num_threads=2)
theirs()
assert_same_bytes(attnc.attention(*arrays, num_threads=2), first)
assert_same_bytes(attnc.attention(*arrays, num_threads=1), first)
try:
    from threadpoolctl import threadpool_info, threadpool_limits
except ImportError:
    sys.exit()
assert any(found["user_api"] == "openmp" for found in threadpool_info())
with threadpool_limits(1, user_api="openmp"):
    assert attnc.get_num_threads() == 1
"""


@pytest.mark.peers
@pytest.mark.parametrize("order", ["first", "last"])
@pytest.mark.parametrize("other", OTHERS)
def test_b43_b65_beside_other_libraries(alone, other, order):
    """Imported before or after a library with threads of its own: both compute, and threadpoolctl limits ours."""
    if importlib.util.find_spec(other.partition(".")[0]) is None:
        pytest.skip(f"{other.partition('.')[0]} is not installed")
    imports = ["import attnc", f"import {other}"][::1 if order == "first" else -1]
    alone("import warnings; warnings.simplefilter('default')\n"      # theirs
          + BESIDE.format(imports="\n".join(imports), other=other), _isa.isa(), timeout=120)


def modules():
    return [Path(_isa.load(isa).__file__) for isa in _isa.available()]


def readelf(*arguments):
    try:
        return subprocess.run(["readelf", "-W", *arguments], capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        pytest.skip("no readelf here")


@pytest.mark.skipif(sys.platform != "linux", reason="reads ELF files")
def test_b43_no_thread_storage_and_no_runtime_but_libgomp():
    """Modules with much static thread-local storage can not be loaded late; a second OpenMP must not be linked."""
    for module in modules():
        storage = [line.split() for line in readelf("-l", module).splitlines() if line.strip().startswith("TLS")]
        assert sum(int(fields[5], 16) for fields in storage) < 1024
        needed = [line.split("[")[1].rstrip("]") for line in readelf("-d", module).splitlines() if "(NEEDED)" in line]
        openmp = [name for name in needed if "omp" in name]
        assert len(openmp) == (1 if _isa.kernels.openmp() else 0) and "iomp" not in str(openmp)


@pytest.mark.more
def test_b47_decoding_one_head_uses_all_threads(isa):
    """The keys of a single row are split over threads, with the same bits for any number."""
    from checking import plans

    query, key, value = qkv(47, (1, 1), 1, 2**18, 64)
    wanted = attnc.attention(query, key, value, num_threads=1)
    for threads in (2, 3, 8):
        assert_same_bytes(attnc.attention(query, key, value, num_threads=threads), wanted)
    with plans() as taken:
        attnc.attention(query, key, value, num_threads=8)
    assert taken[-1].threads == 8 and taken[-1].splits >= 16
    check(attnc, *(x[..., :5000, :] for x in (query, key, value)))


def test_b49_threads_within_affinity_and_limits(python):
    """Processors of the container or the affinity, and OMP_NUM_THREADS, bound the default (quotas: test_threads.py)."""
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n" * hasattr(os, "sched_setaffinity")
    code += "import attnc; print(attnc.get_num_threads())"
    assert python(code) == "1"
    assert int(python("import attnc; print(attnc.get_num_threads())", OMP_NUM_THREADS="3")) <= 3
    assert python("import attnc; print(attnc.get_num_threads())", OMP_NUM_THREADS="1") == "1"


@pytest.mark.parametrize("module", [attnc, reference], ids=["attnc", "reference"])
def test_b71_the_length_of_a_cache(module):
    """9 tokens, then one at a time to capacity: each sees all before it and nothing of the rows that hold NaN."""
    query, key, value = qkv(71, (1, 2), 12, 12, 8)
    cache = module.KVCache(1, 2, 8, capacity=12, dtype=F32)
    if module is attnc:
        cache._keys[...], cache._values[...] = np.nan, np.nan
    assert (cache.attend(query[:, :, :1]) == 0).all()
    for start, stop in ((0, 9), (9, 10), (10, 11), (11, 12)):
        cache.append(key[:, :, start:stop], value[:, :, start:stop])
        got = cache.attend(query[:, :, start:stop], causal=True)
        wanted = module.attention(query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop], causal=True)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
        assert cache.lengths.tolist() == [stop]
    with pytest.raises(ValueError, match="do not fit"):
        cache.append(key[:, :, :1], value[:, :, :1])
    assert cache.lengths.tolist() == [12]


@pytest.mark.parametrize("first", ["numpy", "attnc"])
def test_b75_import_leaves_subnormal_numbers(python, first):
    """No flush to zero after import or a call: in this thread, in those from before and in those from after."""
    code = f"""
import threading
import {first}
import numpy as np
def subnormal():
    assert 5e-324 > 0 and np.float32(1e-45) * np.float32(1) > 0 and (np.full(50, 1e-310) * 0.5).all()
    np.finfo(np.float32), np.finfo(np.float64)
go, seen = threading.Event(), []
early = threading.Thread(target=lambda: (go.wait(), subnormal(), seen.append(1)))
early.start()
import attnc
subnormal()
x = np.random.default_rng(75).standard_normal((2, 4, 200, 64)).astype(np.float32)
attnc.attention(x, x, x, num_threads=2)
subnormal()
late = threading.Thread(target=lambda: (subnormal(), seen.append(1)))
late.start(), go.set(), early.join(), late.join()
print(len(seen))
"""
    assert python(code) == "2"


@pytest.mark.skipif(sys.platform != "linux", reason="asks the loader of Linux")
def test_b79_every_library_is_found():
    """The modules need nothing that is not there (in the wheel libgomp comes along: make wheel checks it)."""
    for module in modules():
        try:
            said = subprocess.run(["ldd", module], capture_output=True, text=True).stdout
        except FileNotFoundError:
            pytest.skip("no ldd here")
        assert "not found" not in said


def test_b83_no_numpy_headers_and_no_size_warnings(python):
    """No C structure of NumPy is compiled in, so that no version of it can differ: its C interface is not named."""
    python("import warnings; warnings.simplefilter('error')\nimport attnc, numpy as np\n"
           "attnc.attention(np.ones((2, 2)), np.ones((2, 2)), np.ones((2, 2)))")
    for module in modules():
        assert b"_ARRAY_API" not in module.read_bytes() and b"numpy.dtype size changed" not in module.read_bytes()


def test_b89_the_number_of_openmp_is_not_changed(isa):
    """Nor by calls that ask for another, nor by those that fail."""
    if not _isa.kernels.openmp():
        pytest.skip("built without OpenMP")
    with open("/proc/self/maps") as maps:
        [path, *_] = [line.split()[-1] for line in maps if "libgomp" in line or "libomp" in line]
    asked = ctypes.CDLL(path).omp_get_max_threads
    before, arrays = asked(), qkv(89, (2, 4), 60, 300, 16)
    for threads in (1, 7):
        attnc.attention(*arrays, num_threads=threads)
        assert asked() == before
    for wrong in (0, -1, 10**6, "2", 2.5):
        with pytest.raises((TypeError, ValueError), match="num_threads"):
            attnc.attention(*arrays, num_threads=wrong)
    assert asked() == before


def test_b97_tiny_work_starts_no_threads(isa, monkeypatch):
    """Small calls stay on the calling thread, whatever the default."""
    from checking import plans

    monkeypatch.setattr(sys.modules["attnc.threads"], "_default", 8)
    for heads, length, depth in ((1, 4, 8), (4, 16, 16)):
        with plans() as taken:
            attnc.attention(*qkv(97, (1, heads), length, length, depth))
        assert taken[-1].threads == 1
    with plans() as taken:
        attnc.attention(*qkv(97, (1, 4), 300, 300, 16))
    assert taken[-1].threads > 1
