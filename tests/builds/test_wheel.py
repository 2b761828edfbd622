"""The archives: what is in them, and that the wheel works without a compiler in an environment of its own."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile

import pytest
from build_tree import ROOT, copy_sources, pip, run

LIMIT = 1_500_000   # bytes, stripped as make wheel does it, without libgomp; kernels take 280 kB a set, data 120

BUILT = pytest.mark.peers       # two minutes of processor time: make test is for every change


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    tree = copy_sources(folder / "tree")
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    done = run(sys.executable, "-c", build, folder=tree)
    assert done.returncode == 0, done.stdout
    [file] = folder.glob("*.tar.gz")
    return file


@pytest.fixture(scope="module")
def wheel(sdist):
    """One wheel, built from the sdist."""
    folder = sdist.parent / "wheel"
    pip("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", folder, sdist, folder=sdist.parent)
    [file] = folder.iterdir()
    return file


def test_the_sdist_holds_the_sources_and_nothing_that_was_made(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "src").rglob("*") if path.is_file()}
    assert sources and sources <= names
    assert {"setup.py", "pyproject.toml", "LICENSE", "LICENSE-libgomp", "README.md"} <= names
    assert "attnc/datasets/data/turkish.npz" in names
    assert not [name for name in names if re.search(r"\.(c|so|pyc|o)$|__pycache__|^build/", name)]


@BUILT
def test_one_wheel_serves_every_python_from_3_11_on(wheel):
    assert re.fullmatch(r"attnc-[0-9.]+-cp311-abi3-\w+\.whl", wheel.name)


@BUILT
@pytest.mark.skipif(not shutil.which("strip"), reason="needs strip")
def test_the_wheel_is_small(wheel, tmp_path):
    small = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as full, zipfile.ZipFile(small, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as stripped:
        full.extractall(tmp_path)
        for name in full.namelist():
            if name.endswith(".so"):
                subprocess.run(["strip", tmp_path / name], check=True)
            stripped.write(tmp_path / name, name)
    assert small.stat().st_size < LIMIT


@BUILT
def test_the_wheel_holds_the_package_exactly(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        info = {name.partition(".dist-info/")[2] for name in archive.namelist()} - {""}
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "attnc").rglob("*")
               if path.is_file() and path.suffix not in (".so", ".pyc")}
    compiled = {name for name in names if name.endswith(".so")}
    assert names - compiled == package
    assert "attnc/_cpu.abi3.so" in compiled and "attnc/_kernels_base.abi3.so" in compiled
    assert all(re.fullmatch(r"attnc/_(cpu|kernels_\w+)\.abi3\.so", name) for name in compiled)
    assert {"METADATA", "RECORD", "WHEEL", "licenses/LICENSE", "licenses/LICENSE-libgomp"} <= info


@pytest.fixture(scope="module")
def python(wheel):
    """The Python of an environment that holds the wheel and what it requires, made without a compiler."""
    environment = wheel.parent.parent / "venv"
    venv.create(environment)
    python = environment / "bin" / "python"
    pip("--python", python, "install", "--only-binary", ":all:", wheel, folder=environment, CC="false")
    return python


@BUILT
@pytest.mark.parametrize(("arguments", "status"), [
    (["info"], 0), (["bench", "--cases", "none of them"], 2), (["view", "missing.npz"], 2), (["nothing"], 2),
])
def test_the_script_does_what_the_module_does(arguments, status, python, tmp_path):
    script = run(python.parent / "attnc", *arguments, folder=tmp_path)
    module = run(python, "-m", "attnc", *arguments, folder=tmp_path)
    assert script.returncode == module.returncode == status, script.stdout
    assert script.stdout == module.stdout.replace("python -m attnc", "attnc")


@BUILT
def test_the_wheel_benchmarks_itself_without_a_compiler_from_an_empty_folder(python, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    packages = pip("--python", python, "list", "--format", "freeze", folder=empty)
    assert {line.partition("==")[0] for line in packages.split()} == {"attnc", "numpy"}

    done = run(python, "-P", "-m", "attnc", "bench", "--quick", "--rounds", "3", folder=empty, CC="false")
    assert done.returncode == 0, done.stdout
    where = run(python, "-P", "-c", "import attnc; print(attnc.__file__)", folder=empty).stdout
    assert where.startswith(str(python.parent.parent))
    for part in ("Ayşe kitabı okudu", "▁kitabı", "Norm of the output row", "within tolerance", "share of limit",
                 "numpy / attnc", "No torch: not installed"):
        assert part in done.stdout
    assert "FAIL" not in done.stdout
    assert os.listdir(empty) == []


def test_the_tests_of_each_built_wheel_need_no_other_file(tmp_path):
    """cibuildwheel copies `test-sources` alone."""
    for name in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]["test-sources"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    done = run(sys.executable, "-P", "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "tests",
               folder=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]
