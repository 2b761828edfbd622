"""The pages of docs/ on attention weights: their examples run, their figures are what those examples draw."""

import importlib.util
import re
import warnings
from pathlib import Path

import numpy as np
import pytest

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

DOCS = Path(__file__).resolve().parents[2] / "docs"
SPEC = importlib.util.spec_from_file_location("figures", DOCS / "figures.py")
figures = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(figures)


def text(page):
    return (DOCS / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", figures.PAGES)
def test_examples_give_what_they_show_and_draw_the_committed_figures(page):
    import PIL.Image
    from matplotlib import pyplot

    images = []
    for link, result in figures.run(text(page), page):
        if link is None:
            assert result == [], "".join(result)
            continue
        images.append(link)
        result.set_dpi(figures.DPI)
        result.canvas.draw()
        drawn = np.asarray(result.canvas.buffer_rgba())[..., :3] / 255
        with PIL.Image.open(DOCS / link) as file:
            committed, made_by = np.asarray(file)[..., :3] / 255, file.info["Software"]
        assert drawn.shape == committed.shape, f"{link}: python docs/figures.py makes it again"
        # Another version of matplotlib may move letters and lines by a pixel.
        same = f"version{matplotlib.__version__}," in made_by
        moved = np.abs(drawn - committed).mean()
        assert moved < (1e-4 if same else 0.02), f"{link}: python docs/figures.py makes it again"
    pyplot.close("all")
    assert len(images) >= 4


def test_every_block_is_run_and_a_wrong_one_is_found():
    for page in figures.PAGES:
        blocks = [part for part in figures.PART.finditer(text(page)) if part["code"]]
        assert len(blocks) == text(page).count("```python") >= 8
    wrong = text(figures.PAGES[0]).replace("ediyor  score 2.272, weight 0.2853", "ediyor  score 2.272, weight 0.2854")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [result for link, result in figures.run(wrong) if link is None and result]


def test_both_languages_run_the_same_examples():
    """Words apart: what a line computes is the same, so that neither page says what the other does not."""
    def lines(page):
        found = re.findall(r"^ *(?:>>>|\.\.\.) (.*)$", text(page), re.MULTILINE)
        computed = [re.sub(r"\s+#.*|f?\".*?\"", "", line) for line in found]
        translated = r"words =|for text, word|title =|labels =|bar =|\s|.*words="
        return [line for line in computed if not re.match(translated, line)]

    one, other = (lines(page) for page in figures.PAGES)
    assert [line for line in one if "attnc.plot.explain" not in line] == [
        line for line in other if "attnc.plot.explain" not in line]
    assert len(one) > 30


def test_links_lead_somewhere():
    for page in figures.PAGES:
        for link in re.findall(r"\]\(([^)]+)\)", text(page)):
            assert (DOCS / link).exists(), link
