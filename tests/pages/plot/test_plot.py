"""Maps and the chain: what is drawn is what was computed, labels can be read, nothing global changes."""

import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import attnc
import attnc.datasets

matplotlib = pytest.importorskip("matplotlib")
from drawn import cells, inside, overlaps, texts  # noqa: E402
from matplotlib import pyplot  # noqa: E402

from attnc import _call, plot  # noqa: E402
from attnc.__main__ import main  # noqa: E402
from attnc._views.lazy import Lazy  # noqa: E402
from attnc.plot._maps import STATISTICS  # noqa: E402

# Maps

def test_a_heatmap_draws_the_weights_of_a_head(weights, data):
    ax = plot.heatmap(weights, data.tokens, head=3)
    np.testing.assert_array_equal(cells(ax), weights[3])
    assert [label.get_text() for label in ax.get_yticklabels()][:3] == ["<s>", "Ayşe", "kitabı"]
    assert ax.get_title() == "head 3" and (ax.get_xlabel(), ax.get_ylabel()) == ("key", "query")
    assert inside(ax.figure) == []
    assert texts(ax)[:2] == [f"{w:.2f}".removeprefix("0") for w in weights[3, 0, :2]]


def test_a_heatmap_without_a_head_is_the_mean_or_the_largest(weights):
    np.testing.assert_allclose(cells(plot.heatmap(weights)), weights.mean(0), rtol=1e-6)
    ax = plot.heatmap(weights, reduce="max")
    np.testing.assert_array_equal(cells(ax), weights.max(0))
    assert ax.get_title() == "largest of 12 heads"


@pytest.mark.parametrize(("norm", "said"), [
    ("sqrt", "square-root colours"), ("log", "log colours"), ("linear", "weight")])
def test_the_bar_says_how_weights_become_colours(weights, norm, said):
    ax = plot.heatmap(weights, head=0, norm=norm)
    bar = ax.figure.axes[1]
    assert said in bar.get_ylabel()
    half = weights[0].max() / 4
    if norm == "sqrt":
        assert np.isclose(ax.images[0].norm(half), 0.5)
        labels = [float(label.get_text()) for label in bar.get_yticklabels()]
        np.testing.assert_allclose(labels, bar.get_yticks(), rtol=5e-3)
        assert labels[0] == 0 and np.isclose(labels[-1], weights[0].max(), rtol=5e-3)
    assert inside(ax.figure) == []


def test_what_is_not_allowed_is_hatched_and_a_weight_of_zero_is_not():
    weights, mask = np.array([[1, 0.0], [0.5, 0.5]]), np.array([[True, True], [True, True]])
    assert not np.ma.getmaskarray(cells(plot.heatmap(weights, mask=mask))).any()
    ax = plot.heatmap(weights)
    assert np.ma.getmaskarray(cells(ax)).tolist() == [[False, True], [False, False]]
    assert ax.patch.get_hatch() and "hatched: not allowed" in ax.figure.axes[1].get_ylabel()
    ax.figure.canvas.draw()
    pixels = np.asarray(ax.figure.canvas.buffer_rgba())[..., :3].astype(int)
    height = len(pixels)

    def patch(column, row):
        """The pixels in the middle of a cell."""
        (x0, y0), (x1, y1) = ax.transData.transform([(column - 0.4, row + 0.4), (column + 0.4, row - 0.4)]).astype(int)
        return pixels[height - y1:height - y0, x0:x1].reshape(-1, 3)

    hidden, zero = patch(1, 0), np.round(255 * np.array(ax.images[0].cmap(0.0)[:3]))
    assert len(np.unique(hidden, axis=0)) > 1 and np.abs(hidden - zero).sum(1).min() > 30


def test_a_long_map_is_pooled_and_its_labels_do_not_overlap(seed):
    query, key = np.random.default_rng(seed).standard_normal((2, 700, 8))
    W = attnc.AttentionWeights(query, key, causal=True)
    dense = np.asarray(W)
    for tokens in (None, [f"▁word{i}" for i in range(700)]):
        ax = plot.heatmap(W, tokens, bins=(70, 100))
        ax.figure.canvas.draw()
        np.testing.assert_allclose(cells(ax)[69, 7], dense[690:, 49:56].sum(1).mean(), rtol=1e-6)
        assert "70 × 100 cells" in ax.figure.axes[1].get_ylabel()
        assert len(ax.get_yticklabels()) > 8 and not overlaps(ax.get_yticklabels())
        assert len(ax.get_xticklabels()) > 5 and not overlaps(ax.get_xticklabels())
        assert inside(ax.figure) == []
    assert cells(plot.heatmap(W)).shape == (256, 256)


def test_labels_tell_the_first_position_of_their_bin(seed):
    query, key = np.random.default_rng(seed).standard_normal((2, 300, 4))
    ax = plot.heatmap(attnc.attention_weights(query, key), [f"t{i}" for i in range(300)], bins=50)
    for place, label in zip(ax.get_yticks(), ax.get_yticklabels(), strict=True):
        assert label.get_text() == f"t{-(-int(place) * 300 // 50)}"


def test_an_axes_of_ones_own_and_options_of_imshow(weights):
    figure, (left, right) = pyplot.subplots(1, 2)
    assert plot.heatmap(weights, head=1, ax=right, cmap="magma", colorbar=False, aspect="equal") is right
    assert len(figure.axes) == 2 and not left.images
    assert right.images[0].cmap.name == "magma" and right.get_aspect() == 1.0


def test_heads_are_ordered_by_a_statistic(weights):
    entropy = -(weights.astype(float) * np.log(weights)).sum(-1).mean(-1)
    figure = plot.heads(weights, order="entropy", most=5)
    assert texts(figure.axes[0]) == [f"head {head}\nentropy {entropy[head]:.2f} nats"
                                     for head in np.argsort(entropy)[:5]]
    for name, sign, values in (("first", -1, weights[..., 0].mean(-1)),
                               ("previous", -1, weights.diagonal(-1, -2, -1).sum(-1) / 11)):
        order = np.argsort(sign * values, kind="stable")
        figure = plot.heads(weights, order=name)
        assert [int(title.split()[1]) for title in texts(figure.axes[0])] == order.tolist()
        for image, head in zip(figure.axes[0].images, order, strict=True):
            np.testing.assert_array_equal(image.get_array(), weights[head])
    assert inside(figure) == []


def test_heads_of_layers_keep_their_grid_and_share_their_colours(weights):
    figure = plot.heads([weights[:4], weights[4:8], weights[8:]])
    ax = figure.axes[0]
    assert texts(ax)[3:6] == ["L0 H3", "L1 H0", "L1 H1"]
    assert {image.norm.vmax for image in ax.images} == {weights.max()} and len(ax.images) == 12
    places = [image.get_extent()[::3] for image in ax.images]       # left and top
    assert len({x for x, _ in places}) == 4 and len({y for _, y in places}) == 3
    assert places == sorted(places, key=lambda place: (place[1], place[0]))
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("key", "query")
    assert inside(figure) == []


# The widest of the statistics that a title adds.
@pytest.mark.parametrize(("shape", "order"), [
    *((shape, order) for shape in ((1, 3, 3), (7, 3, 20), (13, 1, 9), (3, 5, 4, 4)) for order in (None, "previous")),
    ((300, 4, 4), "previous")])
def test_titles_of_heads_stand_above_their_maps_and_meet_nothing(shape, order):
    figure = plot.heads(np.full(shape, 1 / shape[-1]), order=order)
    above_their_maps(figure, int(np.prod(shape[:-2])))


@pytest.mark.parametrize("size", [(5, 4), (9, 4), (4, 8)])
def test_titles_of_heads_in_a_figure_of_ones_own(size):
    figure = pyplot.figure(figsize=size, layout="constrained")
    assert plot.heads(np.full((8, 3, 3), 1 / 3), order="entropy", columns=3, figure=figure) is figure
    above_their_maps(figure, 8)
    whole = pyplot.figure(figsize=(12, 4), layout="constrained")
    for part in whole.subfigures(1, 2):
        plot.heads(np.full((5, 3, 3), 1 / 3), figure=part)
    whole.canvas.draw()
    for part in whole.subfigs:
        above_their_maps(part, 5)


def above_their_maps(figure, count):
    ax = figure.axes[0]
    if figure.canvas.figure is figure:
        assert inside(figure) == []
    titles = [text.get_window_extent() for text in ax.texts]
    maps = [image.get_window_extent() for image in ax.images]
    assert len(titles) == len(maps) == count
    for title, own in zip(titles, maps, strict=True):
        assert own.y1 <= title.y0 + 1 and abs(title.x0 + title.x1 - own.x0 - own.x1) < 2
        assert abs(own.width - own.height) < 1
    boxes = np.array([[*box.p0, *box.p1] for box in titles + maps])
    apart = (boxes[:, None, 2:] <= boxes[None, :, :2] + 1).any(-1)
    assert (apart | apart.T | np.eye(len(boxes), dtype=bool)).all()


def test_keys_that_are_not_allowed_are_hatched_in_the_maps_of_heads():
    figure = plot.heads(np.tri(2)[None] / [[1], [2]])
    assert "hatched: not allowed" in figure.axes[1].get_ylabel()
    figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())[..., :3].astype(int)
    box = figure.axes[0].images[0].get_window_extent()
    x, y = int(box.x0 + 0.75 * box.width), int(len(pixels) - (box.y0 + 0.75 * box.height))
    hidden = pixels[y - 10:y + 10, x - 10:x + 10].reshape(-1, 3)
    assert len(np.unique(hidden, axis=0)) > 1 and np.abs(hidden[:, 0] - hidden[:, 2]).max() < 12    # greys
    assert not plot.heads(np.full((1, 2, 2), 0.5)).axes[0].collections


def test_three_hundred_heads_are_one_axes():
    """An Axes for each head takes 20 ms to make and 50 to lay out: 14 seconds."""
    figure = plot.heads(np.full((300, 8, 8), 1 / 8))
    assert len(figure.axes) == 2 and len(figure.axes[0].images) == 300
    width, height = figure.get_size_inches()
    assert 0.7 < width / height < 2


# The chain

def numbers(ax):
    return [float(text) for text in texts(ax) if re.fullmatch(r"-?\d+\.\d+", text)]


def test_the_chain_has_the_numbers_of_every_link(data):
    query, key, value = data.query[3], data.key[3], data.value[3]
    figure = plot.explain(data.query, data.key, data.value, row=5, tokens=data.tokens, head=3)
    raw, scaled, share, values, weighted = figure.axes[:5]
    weights = attnc.attention_weights(query, key)[5].astype(float)
    np.testing.assert_allclose(numbers(raw), attnc.attention_scores(query, key, stage="raw")[5], atol=5.1e-4)
    np.testing.assert_allclose(numbers(scaled), attnc.attention_scores(query, key)[5], atol=5.1e-4)
    np.testing.assert_allclose(numbers(share), weights, atol=5.1e-5)

    def signed(ax):
        return np.sign(cells(ax)) * np.square(cells(ax))

    np.testing.assert_allclose(signed(values), value, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(signed(weighted), weights[:, None] * value, rtol=1e-5, atol=1e-7)
    said = " ".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))
    assert "weight of “kitabı” = exp(3.101) / Σ exp(score) = exp(3.101 − 4.142) = 0.3530" in said
    assert "output = 0.3530 · v(kitabı) + 0.2222 · v(ediyor)" in said and "all weights sum to 1.0000" in said
    [strip] = [ax for outer in figure.axes for ax in outer.child_axes if ax.images and ax.get_title(loc="left")]
    np.testing.assert_allclose(signed(strip)[0], attnc.attention(query, key, value)[5], rtol=1e-4, atol=1e-6)
    assert inside(figure) == []


EVERY = {
    "causal": {"causal": True}, "window": {"window": (4, 0), "q_offset": 1}, "softcap": {"softcap": 0.7, "scale": 0.3},
    "mask": {"mask": np.random.default_rng(0).random((4, 7, 9)) < 0.7},
    "key_mask": {"key_mask": np.arange(9) != 2}, "bias": {"bias": np.random.default_rng(1).standard_normal((7, 9))},
    "alibi": {"alibi_slopes": np.array([0.1, 0.2, 0.4, 0.8])}, "sinks": {"sinks": np.array([1.0, 2, 3, 4])},
    "segments": {"q_segments": np.arange(7) // 4, "k_segments": np.arange(9) // 5},
    "lengths": {"q_lengths": 6, "kv_lengths": 5, "causal": True},
}


@pytest.mark.parametrize("name", EVERY)
def test_the_chain_obeys_every_option_and_groups_of_heads(name, seed):
    rng = np.random.default_rng(seed)
    query, key, value = rng.standard_normal((4, 7, 8)), rng.standard_normal((2, 9, 8)), rng.standard_normal((2, 9, 5))
    wanted = attnc.attention_weights(query, key, **EVERY[name])[2, 4]
    scores = attnc.attention_scores(query, key, **EVERY[name])[2, 4]
    figure = plot.explain(query, key, value, row=-3, head=2, **EVERY[name])
    panels = {ax.get_title(loc="left"): ax for ax in figure.axes}
    share = numbers(panels["softmax of the scores"])
    np.testing.assert_allclose(share[:9], wanted, atol=5.1e-5)
    if name == "sinks":
        np.testing.assert_allclose(share[9], 1 - wanted.sum(), atol=5.1e-5)
    last = panels.get("with every option")
    if last is not None:
        np.testing.assert_allclose(numbers(last), scores[scores > -np.inf], atol=5.1e-4)
        assert texts(last).count("not allowed") == (scores == -np.inf).sum()
    else:
        assert name == "sinks"


@pytest.mark.parametrize("odd", [{"mask": np.zeros((4, 4), bool)}, {"bias": np.full((4, 4), np.nan)},
                                 {"bias": np.where(np.eye(4) == 1, np.inf, 0)}, {}])
def test_a_row_that_sees_nothing_and_one_of_nan_are_drawn(odd):
    x = np.random.default_rng(0).standard_normal((4, 3))
    value = np.where(np.arange(4)[:, None] == 2, np.inf, x)
    figure = plot.explain(x, x, value, row=0, **odd)
    assert inside(figure) == []
    if "mask" in odd:
        assert texts(figure.axes[2])[:4] == ["not allowed"] * 4 and texts(figure.axes[3])[:4] == ["0.0000"] * 4


@pytest.mark.parametrize("weights", [np.zeros((2, 2)), np.full((2, 2), np.nan), np.ones((1, 1)), np.ones((3, 1)),
                                     np.zeros((1, 300)), np.full((1, 300), np.nan)])
def test_odd_weights_are_drawn(weights):
    for norm in ("sqrt", "log"):
        assert inside(plot.heatmap(weights, norm=norm).figure) == []
    assert inside(plot.heads(weights, order="entropy")) == []
    assert inside(plot.row(weights, 0).figure) == inside(plot.key_mass(weights).figure) == []


def test_many_keys_share_a_line_and_words_may_be_others(data):
    figure = plot.explain(data.query[3], data.key[3], data.value[3], row=5, tokens=data.tokens, most=3,
                          words={"title": "“{token}” ne alıyor?", "others": "başka {count} anahtar"})
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["kitabı", "okudu", "ediyor", "başka 8 anahtar"]
    assert figure.get_suptitle() == "“onu” ne alıyor?"
    assert inside(figure) == []


# What all have in common

CALLS = {
    "heatmap": lambda w, **options: plot.heatmap(w, **options),
    "heads": lambda w, **options: plot.heads(w, **options),
    "row": lambda w, **options: plot.row(w, 0, **{"head": 0} | options),
    "key_mass": lambda w, **options: plot.key_mass(w, **options),
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_global_changes_and_nothing_is_shown(name, weights, monkeypatch):
    monkeypatch.setattr(pyplot, "show", lambda *a, **k: pytest.fail("shown"))
    mine, _ = pyplot.subplots()
    before = dict(matplotlib.rcParams)
    CALLS[name](weights)
    assert dict(matplotlib.rcParams) == before
    assert not mine.axes[0].has_data()


@pytest.mark.parametrize(("call", "options", "error", "text"), [
    ("heatmap", {"tokens": ["a"]}, ValueError, "tokens must be as many as the queries, 11, got 1"),
    ("heatmap", {"key_tokens": ["a"]}, ValueError, "key_tokens must be as many as the keys"),
    ("heatmap", {"bins": 0}, ValueError, "bins must be an integer from 1 to 11, got 0"),
    ("heatmap", {"bins": (12, 1)}, ValueError, "row_bins must be an integer from 1 to 11, got 12"),
    ("heatmap", {"head": 12}, ValueError, "head must be an integer from 0 to 11, got 12"),
    ("heatmap", {"head": (0, 1, 2)}, ValueError, "head must be an integer or a pair"),
    ("heatmap", {"head": 1.5}, TypeError, "head must be an integer"),
    ("heatmap", {"norm": "cubic"}, ValueError, "norm must be one of 'sqrt', 'log', 'linear'"),
    ("heatmap", {"reduce": "sum"}, ValueError, "reduce must be 'mean' or 'max'"),
    ("heads", {"order": "size"}, ValueError, "order must be None or one of 'entropy'"),
    ("heads", {"most": 0}, ValueError, "most must be an integer from 1"),
    ("row", {"most": 0}, ValueError, "most must be an integer from 1"),
    ("row", {"head": None}, ValueError, "head must say which of 12 heads"),
    ("key_mass", {"tokens": ["a"]}, ValueError, "key_tokens must be as many as the keys|tokens must be as many"),
])
def test_bad_input(call, options, error, text, weights):
    with pytest.raises(error, match=text):
        CALLS[call](weights, **options)
    assert pyplot.get_fignums() == []


@pytest.mark.parametrize(("options", "text"), [
    ({"row": 11}, "row must be an integer from -11 to 10, got 11"),
    ({"row": 0, "head": 12}, "head must be an integer from 0 to 11"),
    ({"row": 0, "head": None}, "head must say which of 12 heads"),
    ({"row": 0, "words": {"colour": "x"}}, "words has no place for 'colour'"),
    ({"row": 0, "tokens": ["a"]}, "tokens must be as many as the queries, 11"),
])
def test_bad_input_of_the_chain(options, text, data):
    with pytest.raises(ValueError, match=text):
        plot.explain(data.query, data.key, data.value, **{"head": 3} | options)
    with pytest.raises(TypeError, match="no option want"):
        plot.explain(data.query[3], data.key[3], data.value[3], row=0, want="lse")
    with pytest.raises(ValueError, match="got 11 queries and 0 keys with 32 values each"):
        plot.explain(data.query[3], data.key[3, :0], data.value[3, :0], row=0)
    with pytest.raises(ValueError, match="got a batch of"):
        plot.explain(data.query[None], data.key[None], data.value[None], row=0)
    assert pyplot.get_fignums() == []


def test_without_matplotlib_the_error_says_what_to_install(weights, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install matplotlib"):
        plot.heatmap(weights, head=0)
    broken = SimpleNamespace(find_spec=lambda name, *_: planted() if name == "matplotlib.pyplot" else None)

    def planted():
        raise ImportError("libfreetype.so.6: cannot open shared object file")

    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot")
    monkeypatch.delattr("matplotlib.pyplot")
    monkeypatch.setattr(sys, "meta_path", [broken, *sys.meta_path])
    with pytest.raises(ImportError, match=r"^libfreetype"):       # installed, and broken: the true cause
        plot.heatmap(weights, head=0)


def test_view_writes_a_figure_of_a_head_or_of_all(tmp_path, data, weights, monkeypatch, capsys):
    file, figure, savefig = tmp_path / "a.npz", tmp_path / "a.png", matplotlib.figure.Figure.savefig
    np.savez(file, weights=weights, tokens=np.array(data.tokens))
    for arguments, sides in (["--head", "3"], 1), ([], 12):
        seen = []
        monkeypatch.setattr(matplotlib.figure.Figure, "savefig",
                            lambda made, *a, seen=seen, **k: seen.append(made) or savefig(made, *a, **k))
        assert main(["view", str(file), "--plot", str(figure), *arguments]) == 0
        assert len(seen[0].axes) == 2 and len(seen[0].axes[0].images) == sides
        assert str(figure) in capsys.readouterr().out
        monkeypatch.undo()
    assert main(["view", str(file), "--plot", str(figure), "--head", "0"]) == 0
    assert pyplot.imread(figure).shape[2] >= 3
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["view", str(file), "--plot", str(figure)]) == 2
    assert "matplotlib" in capsys.readouterr().err


def test_control_characters_are_drawn_as_escapes():
    evil = ["\x1b[2J", "\ud800", "\u202ea"]
    x, weights = np.eye(3), np.full((3, 3), 1 / 3)
    drawn = [plot.heatmap(weights, evil), plot.row(weights, 0, evil), plot.key_mass(weights, evil)]
    chain = plot.explain(x, x, x, row=1, tokens=evil, words={"score": "\u202escore"})
    figures = [ax.figure for ax in drawn] + [chain]
    for figure in figures:
        figure.canvas.draw()
        said = "".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))
        assert r"\ud800" in said and {sign for sign in said if not sign.isprintable()} <= {"\n"}


def test_dollar_signs_are_letters():
    ax = plot.heatmap(np.eye(2), ["$x$", "$"])
    ax.figure.canvas.draw()
    assert inside(ax.figure) == []


@pytest.mark.parametrize("options", [{}, {"causal": True, "sinks": np.zeros(3)}], ids=["plain", "options"])
def test_figures_of_lazy_weights_report_progress(options, monkeypatch):
    """From 0 to 1, and every sweep over all rows has a part in it."""
    silent, run = [], _call.run
    monkeypatch.setattr(_call, "run", lambda mode, a, request=None, report=None, **named: (
        silent.append(mode) if report is None and mode in ("attend", "key_statistics") else None,
        run(mode, a, request, report, **named))[1])
    rng = np.random.default_rng(0)
    draws = [(attnc.plot.heatmap, {}), (attnc.plot.heads, {}), (attnc.plot.key_mass, {}),
             *((attnc.plot.heads, {"order": order}) for order in STATISTICS)]
    for draw, more in draws:
        for count in 1, 3:
            layers = [attnc.AttentionWeights(*rng.standard_normal((2, 3, 40, 8)), **options) for _ in range(count)]
            told = []
            draw(layers, **more, progress=lambda done, total, told=told: told.append(done / total))
            assert len(told) >= count and told == sorted(told) and told[-1] == 1 and silent == []
    for draw in attnc.plot.heatmap, attnc.plot.heads, attnc.plot.key_mass:
        with pytest.raises(TypeError, match="progress must be"):
            draw(np.eye(3), progress=3)


def test_a_row_and_the_mass_of_one_head_need_no_other_row_or_head(monkeypatch):
    """Sinks and a given lse among them: what went to no key is that of the row."""
    counted, run = [], _call.run
    monkeypatch.setattr(_call, "run", lambda mode, a, *rest, **named: (
        counted.append((a.q_heads, a.q_len)), run(mode, a, *rest, **named))[1])
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((2, 4, 40, 8))
    for options in {}, {"sinks": np.zeros(4)}, {"sinks": np.zeros(4), "causal": True, "window": (3, 0)}:
        W = attnc.AttentionWeights(query, key, **options)
        attnc.plot.row(W, 7, head=2)
        assert {rows for _, rows in counted} == {1}
        counted.clear()
        attnc.plot.key_mass(W, head=2)
        assert {heads for heads, _ in counted} == {1}
        counted.clear()
        for head, row in (2, 0), (1, 39):
            share, _, nowhere = Lazy(W).row(0, head, row)
            np.testing.assert_allclose(nowhere, 1 - W.dense()[head, row].sum() if "sinks" in options else 0, atol=1e-6)
            np.testing.assert_array_equal(share, W.dense()[head, row])
        counted.clear()
