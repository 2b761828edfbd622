"""Run the tests against the wheel in dist/, in fresh environments without a compiler, under several Pythons.

    python tests/tools/installed.py [python ...]

Without arguments: every python3.11 and newer that is found. Run from an empty directory with `python -P`, so that
neither the checkout nor its editable installation can be imported.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("api", "kernels", "pages", "tools", "weights")     # not those that compile or need other libraries
REQUIRED = ["pytest>=8", "ml_dtypes>=0.5", "hypothesis>=6", "threadpoolctl>=3", "matplotlib>=3.9"]


def works(python: str) -> bool:
    """Whether this is a Python that attnc supports; the name may be there without one behind it."""
    test = "import sys; sys.exit(sys.version_info < (3, 11))"
    return subprocess.run([python, "-c", test], capture_output=True).returncode == 0


def check(python: str, wheel: Path) -> int:
    """pytest's status in an environment of its own."""
    with tempfile.TemporaryDirectory() as folder:
        env, empty = Path(folder) / "env", Path(folder) / "empty"
        empty.mkdir()
        subprocess.run([python, "-m", "venv", env], check=True)
        own = env / "bin" / "python"
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ATTNC_"))}
        clean |= {"CC": "false", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        subprocess.run([own, "-m", "pip", "install", "-q", "--only-binary", ":all:", wheel, *REQUIRED],
                       env=clean, check=True)
        subprocess.run([own, "-P", "-m", "attnc", "info"], env=clean, cwd=empty, check=True)
        tests = [ROOT / "tests" / folder for folder in FOLDERS]
        return subprocess.run([own, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml",
                               *tests], env=clean, cwd=empty).returncode


def main(pythons: list[str]) -> int:
    [wheel] = (ROOT / "dist").glob("*.whl")
    found = [path for minor in range(11, 30) if (path := shutil.which(f"python3.{minor}")) and works(path)]
    for python in pythons or found:
        print(f"--- {python}: {wheel.name}", flush=True)
        if check(python, wheel):
            return 1
    return not (pythons or found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
