"""Bars of one row and of what keys receive: their numbers add up, and names do not collide."""

import re

import numpy as np
import pytest

import attnc
import attnc.datasets

matplotlib = pytest.importorskip("matplotlib")
from drawn import inside, texts  # noqa: E402

from attnc import plot  # noqa: E402


def test_a_row_has_its_largest_weights_and_they_add_up(weights, data):
    ax = plot.row(weights, 5, data.tokens, head=3, most=4)
    share = np.sort(weights[3, 5].astype(float))[::-1]
    bars = [bar for bar in ax.patches if bar.get_x() > 0 or bar.get_width() == share[0]]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["kitabı", "ediyor", "okudu", "Ayşe", "7 other keys"]
    for bar, weight, end in zip(ax.patches[5:], share, np.cumsum(share), strict=False):
        if bar is not ax.patches[-1]:
            assert np.isclose(bar.get_width(), weight) and np.isclose(bar.get_x() + bar.get_width(), end)
    assert bars and np.isclose(ax.patches[-1].get_width(), share[4:].sum())
    assert {"0.3530", "35.3%", "100.0%"} <= set(texts(ax))
    assert ax.get_title(loc="left") == "head 3, “onu”\nentropy 1.88 nats, as 6.6 keys of equal weight"
    assert inside(ax.figure) == []
    assert plot.row(weights[3], 5).get_title(loc="left").startswith("row 5\n")
    layered = plot.row([weights, weights], 5, ["w" * 10**5] * 11, head=(1, 2))
    assert layered.get_title(loc="left").startswith("layer 1, head 2, “" + "w" * 19 + "…”\n")
    assert inside(layered.figure) == []


def test_lines_of_the_scale_do_not_cut_the_bars():
    ax = plot.row(np.array([[0.6, 0.4]]), 0)
    ax.figure.canvas.draw()
    pixels = np.asarray(ax.figure.canvas.buffer_rgba())[..., :3]
    (x0, y), (x1, _) = ax.transData.transform([(0.05, 0), (0.55, 0)]).astype(int)
    assert len(np.unique(pixels[len(pixels) - y, x0:x1], axis=0)) == 1


def test_a_row_shows_the_sink_apart_and_no_key_that_it_may_not_see(seed):
    query, key = np.random.default_rng(seed).standard_normal((2, 6, 4))
    W = attnc.AttentionWeights(query, key, causal=True, sinks=np.array([1.0]))
    ax = plot.row(W, 2)
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert sorted(labels[:3]) == ["key 0", "key 1", "key 2"] and labels[3:] == ["no key (sink)"]
    assert np.isclose(ax.patches[-1].get_width(), np.exp(1 - W.lse[2]))
    entropy = re.search(r"entropy (\S+) nats", ax.get_title(loc="left"))[1]
    assert entropy == f"{W.entropy()[2]:.2f}"
    assert len(plot.row(np.zeros((2, 3)), 0).get_yticklabels()) == 0


def test_key_mass_is_the_mean_over_rows_that_may_see_the_key(seed):
    query, key = np.random.default_rng(seed).standard_normal((2, 3, 9, 4))
    W = attnc.AttentionWeights(query, key, causal=True)
    wanted = np.asarray(W).sum(-2) / np.arange(9, 0, -1)
    np.testing.assert_allclose([bar.get_height() for bar in plot.key_mass(W, head=1).patches], wanted[1])
    ax = plot.key_mass(np.asarray(W), [f"k{i}" for i in range(9)])
    np.testing.assert_allclose([bar.get_height() for bar in ax.patches], wanted.mean(0))
    long = plot.key_mass(np.full((2, 300), 1 / 300), [f"k{i}" for i in range(300)])
    assert texts(long) == ["k0", "k1", "k2"] and inside(long.figure) == []
    assert plot.key_mass(W, head=1).get_title() == "head 1" and ax.get_title() == "mean of 3 heads"


@pytest.mark.parametrize("where", [slice(0, 8), slice(120, 128), slice(146, 154), slice(292, 300),
                                   slice(None, None, 40)])
def test_names_of_the_largest_keys_do_not_collide(where):
    weights = np.full(300, 1e-3)
    weights[where] = np.linspace(0.05, 0.08, len(weights[where]))
    ax = plot.key_mass(weights[None], [f"longer word{i}" for i in range(300)], name=5)
    assert len(ax.texts) == 5 and inside(ax.figure) == []
    boxes = [matplotlib.text.Text.get_window_extent(text) for text in ax.texts]     # without its line
    assert not any(a.overlaps(b) for at, a in enumerate(boxes) for b in boxes[:at])
    bars = ax.transData.transform([(0, 0.08)])[0, 1]
    assert all(box.y0 >= bars for box in boxes)
    for text in ax.texts:       # the line from a name down to its bar meets no other name
        place, end = text.arrow_patch.get_path().vertices[[0, -1]]
        x, y = ax.transData.transform(text.xy)
        assert abs(place[0] - x) < 2 and abs(end[1] - y) < 2
        others = [box for other, box in zip(ax.texts, boxes, strict=True) if other is not text]
        assert not any(box.x0 + 2 < x < box.x1 - 2 and y < box.y1 and box.y0 < place[1] for box in others)
    many = plot.key_mass(weights[None], name=300)
    assert 4 <= len(many.texts) < 100 and inside(many.figure) == []


def test_levels_of_names_for_any_places(seed):
    """No two texts of a level meet, and no line from a text down to its place crosses a lower text."""
    from attnc.plot._style import levels

    rng, fitted = np.random.default_rng(seed), 0
    for _ in range(500):
        count = int(rng.integers(1, 12))
        places = rng.uniform(0, 450, count) if rng.random() < 0.5 else rng.uniform(0, 430) + rng.uniform(0, 20, count)
        texts = ["x" * int(rng.integers(1, 15)) for _ in places]
        found = levels(places.tolist(), texts, 8.5, 450)
        if found is None:
            continue
        fitted += 1
        spans = [(x - 5.78 * len(text) if ends else x, x if ends else x + 5.78 * len(text))     # 0.68 em a letter
                 for x, text, (_, ends) in zip(places, texts, found, strict=True)]
        for at, (one, span) in enumerate(zip(found, spans, strict=True)):
            assert span[0] > -7 and span[1] < 450 + 7
            for x, other, (start, end) in zip(places[:at], found, spans, strict=False):
                assert one[0] != other[0] or span[1] <= start or end <= span[0]
                assert not (start < places[at] < end and one[0] > other[0])
                assert not (span[0] < x < span[1] and other[0] > one[0])
    assert fitted > 400
