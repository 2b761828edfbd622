"""What pictures are made from, lazy or dense; weights in a terminal and in a notebook; ``python -m attnc view``."""

import struct
import sys
import zlib

import numpy as np
import pytest

import attnc
import attnc.datasets
from attnc.__main__ import main
from attnc._views import notebook, terminal, tokens
from attnc._views.colours import ramp
from attnc._views.source import Dense, load

OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (3, 1)},
    "sinks": {"sinks": np.array([0.5, 2.0, -np.inf, 1.0]), "causal": True},
    "lengths": {"kv_lengths": np.array([20, 5]), "q_lengths": np.array([23, 9])},
    "segments": {"q_segments": np.arange(23)[None] // 7, "k_segments": np.arange(29)[None] // 7},
    "mask": {"mask": np.random.default_rng(1).random((1, 4, 23, 29)) < 0.3},
    "bias": {"bias": np.where(np.random.default_rng(2).random((23, 29)) < 0.5, -np.inf, 0.3)},
}


def pair(name, seed):
    """Lazy weights of two layers and four heads, and the same as a dense array with what is allowed."""
    rng = np.random.default_rng(seed)
    query, key = rng.standard_normal((2, 4, 23, 8)), rng.standard_normal((2, 2, 29, 8))
    W = attnc.AttentionWeights(query, key, **OPTIONS[name])
    allowed = attnc.attention_scores(query, key, **{k: v for k, v in OPTIONS[name].items() if k != "sinks"}) > -np.inf
    return load(W), Dense(np.asarray(W), allowed)


def same(got, wanted):
    assert np.shape(got) == np.shape(wanted)
    np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_a_map_is_the_same_from_both_and_says_where_nothing_is_allowed(name, reduce, seed):
    lazy, dense = pair(name, seed)
    for bins in ((23, 29), (7, 5), (1, 1)):
        same(lazy.map(bins, reduce), dense.map(bins, reduce))
    assert np.isnan(dense.map((23, 29), reduce)).sum() == (~dense.allowed).sum()


@pytest.mark.parametrize("name", OPTIONS)
def test_statements_on_rows_and_keys_are_the_same_from_both(name, seed):
    lazy, dense = pair(name, seed)
    assert lazy.shape == dense.shape == (2, 4, 23, 29)
    for got, wanted in zip(lazy.summary((6, 6), 5), dense.summary((6, 6), 5), strict=True):
        if name != "lengths" or wanted.ndim != 3:   # dense weights do not know where rows of a padded batch stand
            same(got, wanted)
    for statement in ("entropy", "no_key", "key_mass"):
        same(getattr(lazy, statement)(), getattr(dense, statement)())
    same(lazy.column(3), dense.weights[..., 3])
    for offset in (-30, -3, 0, 5, 40):
        there = [(i, i + offset) for i in range(23) if 0 <= i + offset < 29]
        wanted = np.zeros((2, 4, 23))
        for i, j in there:
            wanted[..., i] = dense.weights[..., i, j]
        same(lazy.diagonal(offset), wanted)
        same(dense.diagonal(offset), wanted)
    for layer, head in ((0, 0), (1, 3)):
        for got, wanted in zip(lazy.row(layer, head, 11), dense.row(layer, head, 11), strict=True):
            same(got, wanted)
        same(lazy.only(layer, head).map((6, 6), "mean")[0, 0], dense.map((6, 6), "mean")[layer, head])
        same(dense.only(layer, head).entropy()[0, 0], dense.entropy()[layer, head])


def test_the_meaning_of_dense_statements(seed):
    """Against loops: a map's cell, entropy with a sink, the largest weights with ties."""
    rng = np.random.default_rng(seed)
    weights = np.round(rng.dirichlet(np.ones(7), size=(2, 9)), 1) * 0.9
    source = load(weights)
    pooled = source.map((4, 3), "mean")[0]
    for head, a, b in np.ndindex(2, 4, 3):
        rows, columns = [i for i in range(9) if i * 4 // 9 == a], [j for j in range(7) if j * 3 // 7 == b]
        part = weights[head][np.ix_(rows, columns)]
        assert np.isclose(pooled[head, a, b], part.sum(1).mean() if part.any() else np.nan, equal_nan=True)
    for head, row in np.ndindex(2, 9):
        share = weights[head, row]
        with_sink = np.append(share[share > 0], 1 - share.sum())
        assert np.isclose(source.entropy()[0, head, row], -(with_sink * np.log(with_sink)).sum())
        order = sorted(range(7), key=lambda j: (-share[j], j))[:4]
        found = source.topk(4)
        assert found[1][0, head, row].tolist() == [j if share[j] else -1 for j in order]
        assert found[0][0, head, row].tolist() == share[order].tolist()


def test_rounding_alone_is_no_sink_and_small_floats_are_weights(seed):
    import ml_dtypes

    query, key = np.random.default_rng(seed).standard_normal((2, 3, 40, 16))
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32):
        weights = attnc.attention_weights(query.astype(dtype), key.astype(dtype))
        assert not load(weights).no_key().any()
        assert load(weights).entropy().dtype == np.float32


def test_layers_may_be_a_list(seed):
    lazy, dense = pair("causal", seed)
    stacked = load([lazy.weights, dense.weights, dense.weights[0]], None)
    assert stacked.shape == (5, 4, 23, 29)
    same(stacked.map((5, 6), "mean"), np.concatenate([dense.map((5, 6), "mean")] * 2 + [dense.map((5, 6), "mean")[:1]]))
    same(stacked.only(4, 1).entropy()[0, 0], dense.entropy()[0, 1])
    same(stacked.row(3, 2, 5)[0], dense.weights[1, 2, 5])


@pytest.mark.parametrize(("weights", "error", "text"), [
    (np.ones(3), ValueError, r"weights must be \(\.\.\., q_len, kv_len\) and not empty, got shape \(3,\)"),
    (np.ones((2, 0)), ValueError, "not empty"),
    (np.ones((2, 2), int), TypeError, "weights must be floats, got int64"),
    (np.array([[0.5, -3.0]]), ValueError, "scores, attnc.softmax makes weights"),
    (np.array([[0.5, 2.0]]), ValueError, "between 0 and 1, got 0 to 2"),
    ([np.ones((1, 2, 2)), np.ones((1, 2, 3))], ValueError, "all layers must have the same"),
])
def test_what_is_no_weights_is_refused(weights, error, text):
    with pytest.raises(error, match=text):
        load(weights)


def test_masks_are_checked():
    with pytest.raises(TypeError, match="mask must be bool"):
        load(np.eye(2), np.ones((2, 2)))
    with pytest.raises(ValueError, match=r"mask must broadcast to the weights, \(2, 2\), got \(3,\)"):
        load(np.eye(2), np.ones(3, bool))
    with pytest.raises(ValueError, match="lazy weights know their own"):
        load(attnc.AttentionWeights(np.eye(2), np.eye(2)), np.ones((2, 2), bool))
    hidden = np.ma.array(np.eye(2), mask=[[False, True], [False, False]])
    assert np.isnan(load(hidden).map((2, 2), "mean")[0, 0]).tolist() == [[False, True], [False, False]]


# Tokens

def test_sub_word_marks_are_taken_off():
    assert tokens.clean(["▁kitabı", "du", "##ing", "##", "▁", "", "\n", "a\nb", "[CLS]"]) == [
        "kitabı", "du", "ing", "##", "␣", "∅", "⏎", "a⏎b", "[CLS]"]
    # Bytes as letters, the way GPT-2 writes "Ayşe şu\n", and a part of a character.
    assert tokens.clean(["Ay", "ÅŁ", "e", "ĠÅŁu", "Ċ", "Å", "<|endoftext|>"]) == [
        "Ay", "ş", "e", "şu", "⏎", "Å", "<|endoftext|>"]


def test_widths_of_scripts():
    assert [tokens.width(text) for text in ("ab", "注意", "é", "e\u0301", "ab\u200b")] == [2, 4, 1, 1, 2]
    assert tokens.shorten("注意力机制", 7) == "注意力…" and tokens.shorten("kitabı", 6) == "kitabı"


@pytest.mark.parametrize(("given", "error", "text"), [
    (["a"], ValueError, "tokens must be as many as the queries, 3, got 1"),
    ("abc", TypeError, "tokens must be a list of str, got str"),
    (7, TypeError, "got int"),
])
def test_tokens_are_checked(given, error, text):
    with pytest.raises(error, match=text):
        tokens.check_tokens("tokens", given, 3, "the queries")


@pytest.mark.parametrize("bins", [0, (0, 1), (1, 0), 12, (10, 3), (3, 12), (1, 2, 3), 2.0, "8"])
def test_bins_are_checked(bins):
    with pytest.raises((ValueError, TypeError), match="bins"):
        tokens.check_bins(bins, 9, 11, 8)


def test_bins_hold_the_positions_of_the_definition():
    for length, bins in ((11, 4), (9, 9), (512, 96), (7, 1)):
        where = [i * bins // length for i in range(length)]
        assert tokens.starts(length, bins).tolist() == [where.index(b) for b in range(bins)]


def test_colours_go_one_way_in_lightness():
    for dark in (False, True):
        linear = (ramp(dark) / 255) ** 2.2 @ [0.2126, 0.7152, 0.0722]
        steps = np.diff(linear)
        assert (steps > -2e-3).all() if dark else (steps < 2e-3).all()
        assert abs(linear[-1] - linear[0]) > 0.75


# The terminal

@pytest.fixture
def turkish():
    data = attnc.datasets.load("turkish")
    return load(attnc.AttentionWeights(data.query, data.key)), data


def test_the_terminal_shows_the_map_and_the_largest_weights(turkish):
    source, data = turkish
    text = terminal.show(source, data.tokens, head=3, row=5, top=3)
    lines = text.splitlines()
    assert lines[0] == "head 3: 11 queries × 11 keys"
    assert [line[7] for line in lines[2:13]] == [" "] * 5 + ["›"] + [" "] * 5
    weights = attnc.attention_weights(data.query, data.key)[3]
    shades = [[line[8 + 2 * j] for j in range(11)] for line in (line.ljust(40) for line in lines[2:13])]
    for i, j in np.ndindex(11, 11):
        assert shades[i][j] == " ░▒▓█"[round(4 * float(np.sqrt(weights[i, j] / weights.max())))]
    assert "row 5 “onu”: entropy 1.88 nats, 6.6 effective keys" in text
    assert [line.split()[:4] for line in lines[-3:]] == [
        ["kitabı", "key", "2", "0.3530"], ["ediyor", "key", "7", "0.2222"], ["okudu", "key", "3", "0.1118"]]
    assert "\x1b" not in text


def test_the_terminal_fits_long_maps_and_marks_what_is_not_allowed(seed):
    query, key = np.random.default_rng(seed).standard_normal((2, 300, 8))
    source = load(attnc.AttentionWeights(query, key, causal=True, sinks=np.array([2.0])))
    text = terminal.show(source, ["注意力"] * 300, columns=60, row=-1)
    assert all(tokens.width(line) <= 62 for line in text.splitlines())
    assert "cells" in text and "·· not allowed" in text and text.splitlines()[2].endswith("··")
    assert "row 299" in text and "on no key (sink)" in text


@pytest.mark.parametrize("weights", [np.zeros((2, 2)), np.full((2, 2), np.nan), np.ones((1, 1)), np.ones((3, 1))])
def test_odd_weights_have_a_text(weights):
    text = terminal.show(load(weights))
    assert "row 0" in text or "row 1" in text
    assert ("not allowed" in text) is not np.all(weights == 1)


def test_colours_and_ascii(turkish):
    source, data = turkish
    assert "\x1b[48;5;" in terminal.show(source, data.tokens, colour=True)
    plain = terminal.show(source, ["word"] * 11, ascii=True)
    assert plain.isascii() and "mean of 12 heads" in plain


# python -m attnc view

def test_view_reads_queries_and_keys_with_their_options(tmp_path, capsys, seed):
    query, key = np.random.default_rng(seed).standard_normal((2, 3, 12, 8))
    file = tmp_path / "a.npz"
    words = np.array([f"▁w{i}" for i in range(12)])
    np.savez(file, query=query, key=key, causal=True, scale=0.5, tokens=words, other=1)
    assert main(["view", str(file), "--head", "1", "--row", "7", "--top", "2"]) == 0
    text = capsys.readouterr().out
    weights = attnc.attention_weights(query, key, causal=True, scale=0.5)[1, 7]
    for key_at in np.argsort(-weights)[:2]:
        assert f"w{key_at} " in text and f"{weights[key_at]:.4f}" in text
    assert "not allowed" in text and "▁" not in text and "\x1b" not in text


def test_view_writes_a_page_and_reads_weights(tmp_path, capsys):
    file, page = tmp_path / "a.npz", tmp_path / "a.html"
    np.savez(file, weights=np.eye(4)[None], mask=np.tri(4, dtype=bool))
    assert main(["view", str(file), "--html", str(page)]) == 0
    assert str(page) in capsys.readouterr().out
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_view_has_colours_only_on_a_terminal_that_wants_them(tmp_path, monkeypatch, capsys):
    file = tmp_path / "a.npz"
    np.savez(file, weights=np.eye(4))
    for environment, coloured in (({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)):
        with monkeypatch.context() as patch:
            patch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
            for name in ("NO_COLOR", "TERM"):
                patch.delenv(name, raising=False)
            for name, value in environment.items():
                patch.setenv(name, value)
            assert main(["view", str(file)]) == 0
        assert ("\x1b" in capsys.readouterr().out) is coloured


def test_view_writes_what_an_ascii_terminal_can(tmp_path, python):
    file = tmp_path / "a.npz"
    np.savez(file, weights=np.full((2, 2), 0.5), tokens=np.array(["kitabı", "onu"]))
    text = python(f"from attnc.__main__ import main; main(['view', {str(file)!r}])", PYTHONIOENCODING="ascii")
    assert text.isascii() and "kitab?" in text and "##" in text


@pytest.mark.parametrize(("arrays", "arguments", "message"), [
    ({"weights": np.eye(3)}, ["--head", "1"], "head must be an integer from 0 to 0, got 1"),
    ({"weights": np.eye(3)}, ["--row", "3"], "row must be an integer from -3 to 2, got 3"),
    ({"weights": np.ones((2, 2, 3, 3)) / 3}, ["--head", "1"], "head must be a pair"),
    ({"query": np.eye(3)}, [], "must hold weights, or query and key; it holds query"),
    ({"weights": np.eye(3), "tokens": np.array(["a"])}, [], "tokens must be as many as the queries, 3, got 1"),
    ({"query": np.eye(3), "key": np.eye(3), "scale": np.array("x")}, [], "scale must be a real number"),
])
def test_view_says_what_is_wrong(arrays, arguments, message, tmp_path, capsys):
    file = tmp_path / "a.npz"
    np.savez(file, **arrays)
    assert main(["view", str(file), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_view_needs_an_npz_file(tmp_path, capsys):
    for name, content in (("missing.npz", None), ("text.npz", b"no zip"), ("empty.npz", b"")):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        assert main(["view", str(tmp_path / name)]) == 2
        assert name in capsys.readouterr().err
    np.save(tmp_path / "one.npy", np.eye(2))
    assert main(["view", str(tmp_path / "one.npy")]) == 2
    with pytest.raises(SystemExit):
        main(["view", "a.npz", "--head", "one"])


# A notebook

def pixels(png):
    """The image of a PNG as `notebook` writes it, read by the rules of the format."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(png):
        [size] = struct.unpack(">I", png[at:at + 4])
        kind, content, crc = png[at + 4:at + 8], png[at + 8:at + 8 + size], png[at + 8 + size:at + 12 + size]
        assert crc == struct.pack(">I", zlib.crc32(kind + content))
        chunks[kind], at = content, at + 12 + size
    width, height, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert rest == [8, 2, 0, 0, 0] and b"IEND" in chunks
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(height, width, 3)


def test_a_notebook_shows_a_small_picture_with_text_beside_it():
    data = attnc.datasets.load("turkish")
    W = attnc.AttentionWeights(data.query, data.key, causal=True)
    page = notebook.page(W)
    assert len(page) < 20_000 and 'alt="maps of the first 12 of 12 heads"' in page and "11 queries × 11 keys" in page
    assert W._repr_html_() == page and W._repr_png_() == notebook.png(W)
    image = pixels(notebook.png(W))
    # The first row of head 0: all weight on the first key, the darkest colour; then stripes that no weight has.
    assert (image[1, 1] == ramp()[-1]).all()
    assert set(image[1, 16:80, 0].tolist()) == {196, 232}


def test_a_notebook_does_not_wait_for_what_nobody_asked_for():
    big = np.zeros((1, 2**17, 1), np.float32)
    for shape, text in ((attnc.AttentionWeights(big, big), "attnc.plot.heatmap"),
                        (attnc.AttentionWeights(big[:, :0], big), "Nothing to draw")):
        assert notebook.png(shape) is None
        assert text in notebook.page(shape) and "<img" not in notebook.page(shape)


def test_pictures_of_lazy_weights_never_hold_the_matrix(python):
    """8,192 x 8,192 weights are 256 MiB; pictures of them take a small part of that, masks and sinks included."""
    growth = python("""
import resource, numpy as np, attnc
from attnc._views import terminal, notebook
from attnc._views.source import load
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
query, key = np.random.default_rng(0).standard_normal((2, 8192, 16), dtype=np.float32)
options = {"causal": True, "sinks": np.ones(1), "key_mask": np.arange(8192) != 5}
attnc.explorer(attnc.AttentionWeights(query[:99], key[:99]))
before = peak()
W = attnc.AttentionWeights(query, key, **options)
attnc.explorer(W)
terminal.show(load(W))
notebook.page(W)
source = load([W, W])
source.map((256, 256), "max"), source.key_mass(), source.diagonal(-1), source.row(1, 0, 8000)
print(peak() - before)
""")
    assert float(growth) < 64
