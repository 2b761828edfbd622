"""Follow the links of the built site that stay inside it: pages, anchors, images, downloads.

    python docs/links.py build/docs
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

NO_FILES = ("http", "https", "mailto", "data", "javascript")


class Page(HTMLParser):
    """The anchors of a page, the addresses it names, and its images without a description."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors, self.addresses, self.bare = {""}, [], []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        given = dict(attrs)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        self.addresses += [given[name] for name in ("href", "src") if given.get(name)]
        # The title beside a thumbnail says what it leads to; an empty description keeps it from being read twice.
        if tag == "img" and not given.get("alt") and not (given.get("alt") == "" and "_thumb." in given["src"]):
            self.bare.append(given.get("src"))


def broken(site: Path) -> list[str]:
    """What is wrong with the links and images of a site, one line each."""
    files = [path.resolve() for path in sorted(site.rglob("*.html")) if "_static" not in path.parts]
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in files}
    found = []
    for path, page in pages.items():
        found += [f"{path}: no description of {image}" for image in page.bare]
        for address in page.addresses:
            parts = urlsplit(address)
            if parts.scheme in NO_FILES or parts.netloc or address == "#":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                found.append(f"{path}: {address} is not there")
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{path}: {address} has no such anchor")
    return sorted(set(found))


def main(site: str) -> int:
    found = broken(Path(site))
    if found:
        print(*found, sep="\n", file=sys.stderr)
    return 1 if found or not any(Path(site).rglob("*.html")) else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
