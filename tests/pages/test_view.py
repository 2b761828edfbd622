"""What pictures are made from, lazy or dense; weights in a terminal and in a notebook."""

import struct
import sys
import time
import unicodedata
import zlib

import numpy as np
import pytest

import attnc
import attnc.datasets
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


class Tensor:
    """An array of another library: NumPy can read it, and its method of a name of ours does something else."""

    def __init__(self, array):
        self._array = array
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self._array, dtype)

    def topk(self, k):
        raise AssertionError("no method of attnc")


class Recorded(Tensor):
    """As a tensor of torch that requires a gradient: it must leave its graph, and one of bfloat16 widen, to be read."""

    def __init__(self, array, dtype="float32"):
        super().__init__(array)
        self.dtype = f"torch.{dtype}"
        self.done = []

    def _did(self, what):
        self.done.append(what)
        return self

    def detach(self):
        return self._did("detach")

    def cpu(self):
        return self._did("cpu")

    def float(self):
        return self._did("float")

    def __array__(self, dtype=None, copy=None):
        assert self.done == ["detach", "cpu"] + ["float"] * (self.dtype == "torch.bfloat16")
        self.done.clear()
        return super().__array__(dtype)


@pytest.mark.parametrize("foreign", [Tensor, Recorded, lambda x: Recorded(x, "bfloat16")])
@pytest.mark.parametrize("layers", [lambda x: x, lambda x: (x, x), lambda x: [x] * 3])
def test_arrays_of_other_libraries_are_arrays(foreign, layers, seed):
    weights = np.random.default_rng(seed).dirichlet(np.ones(6), size=(2, 5)).astype(np.float32)
    got, wanted = load(layers(foreign(weights))), load(layers(weights))
    assert got.shape == wanted.shape
    same(got.map((5, 6), "mean"), wanted.map((5, 6), "mean"))
    mask = weights > 0.1
    same(load(foreign(weights), Tensor(mask)).key_mass(), load(weights, mask).key_mass())
    same(load(layers(foreign(weights))).entropy(), load(layers(weights)).entropy())


def test_arrays_that_only_export_their_memory_are_arrays(seed):
    class Exported:
        def __init__(self, array):
            self.array, self.shape = array, array.shape

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    weights = np.random.default_rng(seed).dirichlet(np.ones(6), size=(2, 5))
    same(load([Exported(weights)] * 2).entropy(), load([weights] * 2).entropy())


def test_the_rounding_of_bfloat16_in_another_library_is_no_sink(seed):
    weights = np.random.default_rng(seed).dirichlet(np.ones(64), size=8).astype(np.float32)
    bits = weights.view(np.uint32) >> 16 << 16
    rounded = bits.view(np.float32)      # cut, not rounded: all of the error on one side
    assert load(rounded).no_key().any() and not load(Recorded(rounded, "bfloat16")).no_key().any()


@pytest.mark.parametrize(("weights", "error", "text"), [
    (np.ones(3), ValueError, r"weights must be \(\.\.\., q_len, kv_len\) and not empty, got shape \(3,\)"),
    (np.ones((2, 0)), ValueError, "not empty"),
    (np.ones((2, 2), int), TypeError, "weights must be floats, got int64"),
    (np.array([[0.5, -3.0]]), ValueError, "scores, attnc.softmax makes weights"),
    (np.array([[0.5, 2.0]]), ValueError, "between 0 and 1, got 0 to 2"),
    ([np.ones((1, 2, 2)), np.ones((1, 2, 3))], ValueError, "all layers must have the same"),
    ((None, None), TypeError, "got None: a model of transformers returns its weights with output_attentions=True"),
    (((np.eye(2),), (np.ones((1, 2)),)), ValueError, "weights must be readable as one array, got tuple"),
    (object(), TypeError, "weights must be an array of floats or AttentionWeights, got object <object"),
    (attnc.AttentionWeights(np.ones((5, 8)), np.ones((6, 8))).T, TypeError, r"Weights, got Transposed\(shape=\(6, 5\)"),
    (None, TypeError, "weights must be an array, got None"),
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


CONTROLS = {
    "\x1b[2J": r"\x1b[2J", "\x00\x07\x7f": r"\x00\x07\x7f", "\x9b\x9d": r"\x9b\x9d", "\x85": r"\x85",
    "\u202ea\u202c": r"\u202ea\u202c", "\u2066\u2069\u061c\u200e\u200f": r"\u2066\u2069\u061c\u200e\u200f",
    "a\u200bb\ufeff": r"a\u200bb\ufeff", "a\u200cb\u200d": r"a\u200cb\u200d", "\u2060\u00ad\u034f": r"\u2060\xad\u034f",
    "\u2028\u2029": r"\u2028\u2029", "\ud800": r"\ud800", "\U000e0041": r"\U000e0041",
    "\u034f": r"\u034f", "b\u200c\u0645": "b\\u200c\u0645", "\u0645\u200db": "\u0645\\u200db",
}


@pytest.mark.parametrize("text", CONTROLS)
def test_control_characters_become_visible(text):
    assert tokens.visible(text) == CONTROLS[text] and tokens.visible(f"a{text}é") == f"a{CONTROLS[text]}é"
    assert tokens.clean([f"x{text}"]) == [f"x{CONTROLS[text]}"]
    assert tokens.visible_lines(f"a\n{text}") == f"a\n{CONTROLS[text]}"


def test_what_scripts_are_written_with_stays():
    # A joiner within a word of Persian, of Hindi, in a family; a variation selector; an accent; a number sign.
    for text in ("\u0645\u06cc\u200c\u062e\u0648", "\u0915\u094d\u200d\u0937", "\U0001f468\u200d\U0001f469",
                 "\u2764\ufe0f\u200d\U0001f525", "é e\u0301 注意 \xa0", "\u0600\u0661"):
        assert tokens.visible(text) == text
    assert tokens.clean(["a\tb", "a\r\nb", "\t "]) == ["a⇥b", "a␍⏎b", "⇥␣"]


def test_no_control_character_of_unicode_is_left():
    controls = [sign for sign in map(chr, range(sys.maxunicode + 1))
                if unicodedata.category(sign) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    left = [unicodedata.name(sign).split()[0] for sign in controls if tokens.visible(sign) == sign]
    assert len(controls) > 2200 and set(left) == {"ARABIC", "SYRIAC", "KAITHI"} and len(left) == 13


def test_labels_of_long_tokens_take_no_time():
    """A token of a million letters is read as far as its label goes; combining marks do not make a label longer."""
    began = time.process_time()
    for text in ("a" * 10**6, "注" * 10**6, "a" + "\u0301" * 10**6):
        for _ in range(100):
            short = tokens.shorten(text, 14)
            assert tokens.width(short) <= 14 and len(short) < 300 and short[-1] == "…"
    assert time.process_time() - began < 2
    assert [tokens.shorten("e\u0301" * 3, n) for n in (3, 2, 1)] == ["e\u0301" * 3, "e\u0301…", "…"]
    for text in ("kitabı", "注意力", "a注b", ""):
        for columns in range(1, 8):
            short = tokens.shorten(text, columns)
            assert tokens.width(short) <= columns and (short == text or tokens.width(text) > columns)


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
