"""The instruction set: chosen, asked for, refused; and each path of the kernels taken where it is meant to be."""

import importlib
import platform
import re
import shutil
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from checking import inputs, plans

import attnc
from attnc import _cpu, _isa

pytestmark = pytest.mark.kernels


def test_the_best_one_is_chosen(python):
    assert python("import attnc; print(attnc.isa())") == _isa.available()[0]


@pytest.mark.parametrize("name", _isa.available())
def test_the_environment_chooses(python, name):
    code = "import attnc; attnc.softmax([1.0, 2.0]); print(attnc.isa(), attnc.show_config()['isa'])"
    assert python(code, ATTNC_ISA=name) == f"{name} {name}"


@pytest.mark.parametrize("name", ["avx1024", "AVX2", "sse"])
def test_an_unknown_one_is_refused_with_the_list(python, name):
    code = "try: import attnc\nexcept ImportError as error: print(error)"
    said = python(code, ATTNC_ISA=name)
    assert repr(name) in said and said.endswith(", ".join(_isa.available()))


def test_one_that_cannot_run_is_refused(monkeypatch):
    last = _isa.available()[-1]
    monkeypatch.setattr(_cpu, "supports", lambda name: name == last)
    assert _isa.available() == (last,)
    for name in {"avx2", "avx512", "avx512bf16"} - {last}:
        with pytest.raises(ImportError, match=f"'{name}' (cannot run here|was left out).*available: {last}$"):
            _isa.load(name)


def test_only_the_chosen_module_is_loaded(python):
    code = "import sys, attnc; print([name for name in sys.modules if '_kernels_' in name])"
    for name in _isa.available():
        module = "avx512" if name == "avx512bf16" else name
        assert python(code, ATTNC_ISA=name) == f"['attnc._kernels_{module}']"


FAILING = """
import sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == {module!r}:
            raise {error}
sys.meta_path.insert(0, Finder)
try:
    import attnc
except ImportError as error:
    print(type(error).__name__, error, "|", error.__cause__)
"""


@pytest.mark.parametrize(("error", "said"), [
    ("ModuleNotFoundError('No module named NAME', name='NAME')", "kernels are missing. In a source tree, build them"),
    ("ImportError('libgomp.so.1: cannot open shared object file')",
     "module NAME cannot be loaded: libgomp.so.1: cannot open shared object file"),
    ("ModuleNotFoundError('No module named other', name='other')", "ModuleNotFoundError No module named other | None"),
])
@pytest.mark.parametrize("module", ["_cpu", _isa.kernels.__name__.partition(".")[2]])
def test_a_failing_import_tells_its_cause(python, module, error, said):
    error, said = (text.replace("NAME", f"attnc.{module}") for text in (error, said))
    assert said in python(FAILING.format(module=f"attnc.{module}", error=error))


def test_a_second_interpreter_is_refused_with_the_cause(python):
    code = r"""
import attnc
try:
    import _interpreters as interpreters
except ModuleNotFoundError:
    import _xxsubinterpreters as interpreters
code = "try: import attnc\nexcept ImportError as error: print(error, flush=True)"
interpreters.run_string(interpreters.create(), code)
"""
    pytest.importorskip("_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters")
    said = python(code)
    assert said.startswith("attnc: the compiled module attnc._cpu cannot be loaded: ")
    assert "nterpreter" in said.partition(": ")[2].partition(": ")[2] and "build" not in said


def test_the_fixture_runs_what_it_says(isa):
    assert attnc.isa() == attnc.show_config()["isa"] == isa and _isa.kernels is _isa.load(isa)


@pytest.mark.parametrize("q_len", [4, 32])
def test_one_module_multiplies_pairs_for_the_set_that_has_them(isa, q_len):
    """avx512 and avx512bf16 share a module. Dot products of bfloat16 pairs, read in place and packed, take a subnormal
    number for 0; every other product counts it."""
    shape = (1, q_len, 128)
    query, key, value = (np.full(shape, x).astype(ml_dtypes.bfloat16) for x in (1e38, 1e-39, 1))
    scores = attnc.attention_scores(query, key, scale=1.0)
    assert np.all(scores == 0) if isa == "avx512bf16" else np.all(np.abs(scores - 12.8) < 0.2)
    lse = attnc.attention(query, key, value, scale=1.0, want="lse").lse
    np.testing.assert_allclose(lse, np.log(q_len) + scores[..., 0], rtol=1e-6)


# An instruction above the base would end the process on an old machine. Only what the compiler makes of our sources is
# searched: it cannot know registers wider than 16 bytes, nor encodings with a VEX or EVEX prefix (a mnemonic with v).
# tzcnt is how "rep bsf" is shown, which older processors run as bsf: the same for what is not 0.

ABOVE = re.compile(      # VEX and EVEX forms, SSSE3, SSE4.1, SSE4.2, POPCNT, BMI
    r"v(?!er)[a-z]|pshufb|palign|pabs|phadd|psign|pmulhrs|blend|pblend|round[sp][sd]|ptest|pminu[dw]|pmaxs[bd]|pmulld|"
    r"insertps|extractps|pextr[bdq]|pinsr[bdq]|crc32|popcnt|lzcnt|andn(?!p[sd])|bextr|mulx|rorx|sarx|shlx|shrx|movbe")


def disassembled(path):
    command = ["objdump", "-d", "--no-show-raw-insn", path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("module", ["_cpu", "_kernels_base"])
def test_no_instruction_above_the_base(module):
    if platform.machine() != "x86_64" or shutil.which("objdump") is None:
        pytest.skip("not x86-64, or no objdump to look at the instructions")
    listing = disassembled(importlib.import_module(f"attnc.{module}").__spec__.origin)
    instructions = re.findall(r"^\s+[0-9a-f]+:\t(\S+)(.*)$", listing, re.MULTILINE)
    assert len(instructions) > 500
    above = [f"{name} {operands}" for name, operands in instructions
             if ABOVE.match(name) or re.search(r"%[yz]mm|%k[0-7]\b", operands)]
    assert not above, f"{len(above)} instructions, first {above[:5]}"


def test_the_search_finds_wider_registers():
    """The module of the widest set has what the base must not have: the test above can fail."""
    name = _isa.available()[0]
    if shutil.which("objdump") is None or name in ("base", "neon"):
        pytest.skip("no objdump, or no set above the base here")
    assert re.search(r"\tv\w+ .*%[yz]mm", disassembled(_isa.load(name).__spec__.origin))


# How calls are cut

def plan(q_heads, kv_heads, q_len, kv_len, head_dim=16, value_dim=None, dtype="float32", function=None, **options):
    """The plan of one call; of the last one if there are two."""
    arrays = inputs(np.random.default_rng(0), (1,), q_heads, kv_heads, q_len, kv_len, head_dim, value_dim, dtype)
    with plans() as taken:
        if function is None:
            attnc.attention(*arrays, **options)
        else:
            function(*arrays[:2], **options)
    return taken[-1]


def test_few_rows_whole_heads_and_shared_keys(isa):
    """Up to 64 rows of a kv head are one task. More are one task where the heads divide among the threads, or share."""
    few, whole, shared = (plan(8, 2, q_len, 600, num_threads=n) for q_len, n in ((16, 7), (17, 2), (17, 7)))
    assert not few.shared and few.block_q >= 64
    assert not whole.shared and whole.block_q >= 68
    assert shared.shared and shared.block_q < 68
    assert few.splits == whole.splits == shared.splits == 1


def test_a_head_is_cut_into_equal_parts(isa):
    """Two threads take half a head each and pack for themselves; rows that see fewer keys than others are shared."""
    halves, causal, short = (plan(1, 1, q_len, 600, num_threads=2, **options) for q_len, options in (
        (1100, {}), (1100, {"causal": True}), (900, {})))
    assert not halves.shared and 550 <= halves.block_q <= 555
    assert causal.shared and short.shared
    assert causal.block_q == 138                 # 8 tasks of 22 or 23 groups of six


@pytest.mark.parametrize("options, parts", [({}, 2), ({"causal": True}, 8), ({"num_threads": 1}, 1)])
def test_fused_heads_of_many_rows_are_cut_without_packing(isa, options, parts):
    """With 32-byte vectors heads of many rows and few keys are fused: no keys are shared, whatever the parts."""
    if isa != "avx2":
        pytest.skip("only AVX2 fuses more than 64 rows")
    taken = plan(1, 1, 960, 40, **{"num_threads": 2} | options)
    assert taken.path == "fused" and not taken.shared
    assert taken.block_q == 960 // parts
    assert plan(1, 1, 960, 600).path == "packed"


def test_long_heads_are_cut_into_short_parts(isa):
    """Keys that take more than 16 MB packed come from memory once for each part, instead of once for 24 rows."""
    halves, causal, cached, few = (plan(128, 1, 1, kv_len, 576, 512, num_threads=threads, **options)
                                   for kv_len, threads, options in (
        (5000, 2, {}), (5000, 2, {"causal": True, "q_offset": 0}), (3000, 2, {}), (5000, 6, {})))
    assert not halves.shared and 64 <= halves.block_q <= 66
    assert causal.shared and cached.shared and few.shared
    whole = plan(128, 1, 1, 5000, 576, 512, num_threads=1)
    assert halves.block_k == whole.block_k and halves.splits == whole.splits == 1


def test_few_rows_split_many_keys_by_their_number(isa):
    for kv_len in (1, 1000, 5000):
        assert plan(4, 2, 1, kv_len).splits == plan(4, 2, 1, kv_len, num_threads=2).splits
    assert plan(4, 2, 1, 1000).splits == 1
    assert plan(4, 2, 1, 5000).splits > 1
    assert plan(4, 2, 100, 5000).splits == 1


@pytest.mark.parametrize("q_lens", [(1, 6), (9, 200)])
def test_blocks_follow_from_depth_and_dtype_alone(isa, q_lens):
    """And from whether rows are few; not from batch or threads, as the bits depend on them: a row keeps its bits."""
    for dtype in ("float32", "float64"):
        blocks = {plan(heads, heads, q_len, kv_len, 64, dtype=dtype, num_threads=threads).block_k
                  for heads in (1, 3) for q_len in q_lens for kv_len in (3, 700) for threads in (1, 2)}
        assert len(blocks) == 1
    assert plan(1, 1, 200, 9, 1024).block_k < plan(1, 1, 200, 9, 16).block_k


def test_weights_are_kept_or_computed_again(isa):
    assert plan(1, 1, 100, 400, want="weights").kept_scores
    assert not plan(1, 1, 100, 400).kept_scores
    assert not plan(1, 1, 100, 30000, want="weights").kept_scores
    assert plan(1, 1, 100, 400, function=attnc.attention_weights).kept_scores
    assert not plan(1, 1, 1, 5000, want="weights").kept_scores, "few rows whose keys are split take a second pass"


def test_threads_are_those_asked_for(isa):
    for threads in (1, 2, 3, 7):
        assert plan(8, 8, 100, 100, num_threads=threads).threads == threads
    with attnc.threads(2):
        assert plan(8, 8, 100, 100).threads == 2
