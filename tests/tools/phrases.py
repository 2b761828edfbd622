"""Look for banned phrases in pages, comments and docstrings; `make lint` runs it.

    python tests/tools/phrases.py
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("banned_phrases.txt")
KINDS = (".md", ".rst", ".py", ".pyi", ".pyx", ".pxi", ".h", ".c", ".css", ".js", ".toml", ".yml", ".txt")
NOT_READ = (LIST.name, "phrases.py", "test_phrases.py", "refused_models.txt")


def banned(text: str) -> list[tuple[re.Pattern, str]]:
    """The expressions of the list, each with what to write instead."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    pairs = [re.split(r"\s{2,}", line, maxsplit=1) for line in lines]
    return [(re.compile(phrase.replace(" ", r"[\s*#>]+"), re.IGNORECASE), instead) for phrase, instead in pairs]


def found(text: str, phrases: list) -> list[tuple[int, str, str]]:
    """Line, phrase and what to write instead; a phrase may go on in the next line of a comment."""
    return sorted((text.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), instead)
                  for phrase, instead in phrases for match in phrase.finditer(text))


def files() -> list[Path]:
    """What git tracks and people read, but Turkish pages, results and the list itself."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in tracked.splitlines()]
    paths = [path for path in paths if path.is_file() and (path.suffix in KINDS or path.name == "Makefile")]
    return [path for path in paths if not path.name.endswith(".tr.md") and path.name not in NOT_READ]


def main() -> int:
    phrases = banned(LIST.read_text(encoding="utf-8"))
    lines = [f"{path.relative_to(ROOT)}:{line}: {phrase!r}; rather: {instead}" for path in files()
             for line, phrase, instead in found(path.read_text(encoding="utf-8"), phrases)]
    print(*lines, sep="\n", end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
