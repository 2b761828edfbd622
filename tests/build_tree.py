"""A copy of the source tree to build from, and compilers that lack something."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE", "LICENSE-libgomp",
           "src", "attnc")
MADE = shutil.ignore_patterns("*.so", "__pycache__")
COMPILER = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
# Neither the checkout nor its editable installation may be what is imported.
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ATTNC_"))}


def copy_sources(folder: Path) -> Path:
    """The files that a build needs, without anything that a build made."""
    folder.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=MADE)
        else:
            shutil.copy(ROOT / name, folder)
    return folder


def run(*command, folder: Path, **environment) -> subprocess.CompletedProcess:
    """A finished command with its output as text; stderr is part of stdout."""
    return subprocess.run([str(word) for word in command], cwd=folder, env=CLEAN | environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, timeout=300)


def pip(*arguments, folder: Path, **environment) -> str:
    """What pip says, which must succeed; build requirements are those of this environment."""
    done = run(sys.executable, "-m", "pip", *arguments, folder=folder,
               PIP_DISABLE_PIP_VERSION_CHECK="1", **environment)
    assert done.returncode == 0, done.stdout
    return done.stdout


def compiler(file: Path, *, cc: str = COMPILER, refuses: str = "-none", flags: str = "", compiles: bool = True) -> str:
    """A compiler that fails if an argument is like one of the shell patterns `refuses`, and else adds `flags`; one that
    does not compile writes its arguments to a log beside it and gives empty files."""
    work = f'exec {cc} "$@" {flags}' if compiles else f'''\
    echo "$*" >> {file}.log
    while [ $# -gt 1 ]; do [ "$1" != -o ] || : > "$2"; shift; done'''
    file.write_text(f'''\
#!/bin/sh
for word; do case "$word" in {refuses}) echo "unknown: $word" >&2; exit 1;; esac; done
{work}
''')
    file.chmod(0o755)
    return str(file)
