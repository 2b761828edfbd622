"""Make the figures of the pages in docs/ by running the pages: an image shows the `figure` of the examples before it.

    python docs/figures.py
"""

import doctest
import re
import sys
import textwrap
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PAGES = ("attention-weight.md", "attention-weight.tr.md")
DPI = 110
PART = re.compile(r"^( *)```python\n(?P<code>.*?)^\1```$|!\[[^\]]*\]\((?P<image>[^)]+)\)", re.MULTILINE | re.DOTALL)


def run(text: str, name: str = "page"):
    """Run the examples of a page in their order.

    Yields
    ------
    image : str or None
        The link of an image, or None after a block of examples.
    result
        The figure for an image; for a block the list of what its examples gave that they do not show.
    """
    names = {}
    runner = doctest.DocTestRunner(verbose=False)
    for part in PART.finditer(text):
        if part["image"]:
            yield part["image"], names.get("figure")
            continue
        found = []
        line = text.count("\n", 0, part.start()) + 1
        block = doctest.DocTestParser().get_doctest(textwrap.dedent(part["code"]), names, name, None, line)
        runner.run(block, out=found.append, clear_globs=False)
        names = block.globs
        yield None, found


def main() -> int:
    import matplotlib

    matplotlib.use("Agg")
    for page in PAGES:
        for image, result in run((DOCS / page).read_text(encoding="utf-8"), page):
            if image:
                result.savefig(DOCS / image, dpi=DPI)
                print(f"{image}: {(DOCS / image).stat().st_size:,} bytes")
            elif result:
                print(*result, file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
