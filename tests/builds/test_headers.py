"""Every header of src/ says what it needs: each compiles alone, templates after those that their first lines name."""

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src"
HEADERS = sorted(path.relative_to(SRC).as_posix() for path in SRC.rglob("*.h"))
COMPILER = (sysconfig.get_config_var("CC") or "cc").split()
# Parts of one header each: chosen by the compiler's flags, or made of macros alone.
PARTS = {"simd/avx2.h", "simd/avx512.h", "simd/neon.h", "simd/base.h", "simd/exponent.h", "template.h"}
SETS = {"base": [], "avx512": ["-march=x86-64-v4"]}


def first_comment(header):
    text = (SRC / header).read_text(encoding="utf-8")
    assert text.startswith(f"/* {header.rpartition('/')[2]}"), f"{header} does not begin with its name"
    return re.sub(r"\s*\n \*", "", text[:text.index("*/")])


def needs(header):
    """The templates that a template comes after, or None for a header that includes what it uses."""
    said = re.match(r"/\* \S+ \(template (?:over REAL|for float)(?:; after ([^)]*))?\)", first_comment(header))
    return None if said is None else re.split(r",\s*", said[1]) if said[1] else []


def in_order(header, found):
    """The header after all that it needs, directly or not."""
    for other in needs(header):
        if other not in found:
            in_order(other, found)
    found.append(header)
    return found


def source(header):
    if needs(header) is None:
        return f'#include "{header}"\n'
    before = (SRC / "kernels.h").read_text(encoding="utf-8").partition('#include "template.h"')[0]
    parameters = (SRC / "template.h").read_text(encoding="utf-8").partition("#include")[0]
    guard_ends = "\n#endif\n"
    return before + parameters + "".join(f'#include "{part}"\n' for part in in_order(header, [])) + guard_ends


def test_no_two_headers_have_one_name():
    names = [header.rpartition("/")[2] for header in HEADERS]
    assert len(names) > 50 and sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("flags", SETS)
@pytest.mark.parametrize("header", [header for header in HEADERS if header not in PARTS])
def test_compiles_alone(header, flags, tmp_path):
    if shutil.which(COMPILER[0]) is None:
        pytest.skip("no C compiler")
    probe = tmp_path / "probe.c"
    probe.write_text(source(header), encoding="utf-8")
    command = [*COMPILER, "-std=c11", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function",
               f"-I{SRC}", f"-I{sysconfig.get_path('include')}", *SETS[flags], str(probe)]
    done = subprocess.run(command, capture_output=True, text=True)
    if "unrecognized" in done.stderr or "unknown" in done.stderr.partition("\n")[0]:
        pytest.skip(f"the compiler knows no {flags}")
    assert done.returncode == 0, done.stderr


def test_a_template_that_is_not_named_is_missed(tmp_path):
    """The check can fail: without what its first line names, a template does not compile."""
    probe = tmp_path / "probe.c"
    probe.write_text(source("attention/scores.h").replace('#include "gemm/rank1.h"\n', ""), encoding="utf-8")
    done = subprocess.run([*COMPILER, "-std=c11", "-fsyntax-only", "-Werror=implicit-function-declaration", f"-I{SRC}",
                           f"-I{sysconfig.get_path('include')}", str(probe)], capture_output=True, text=True)
    assert done.returncode != 0 and "rank1_f32" in done.stderr
