"""The page to explore weights: what is inside is what was given, it needs nothing else, and it is small."""

import base64
import html.parser
import json
import re

import numpy as np
import pytest

import attnc
import attnc.datasets
from attnc._views.explorer import Page


def inside(page):
    """The data of a page, as its program reads it."""
    [text] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.html, re.DOTALL)
    return json.loads(text)


def array(text, dtype):
    return np.frombuffer(base64.b64decode(text), dtype)


def best(data, head, row):
    """(key, weight) of the kept entries of a row."""
    codes = array(data["rowData"][head][3], np.uint8).reshape(data["rows"], data["top"], 3) @ [1, 256, 65536]
    bits = data["weightBits"]
    return [(code >> bits, ((code & 2**bits - 1) / (2**bits - 1)) ** 2) for code in codes[row] if code]


@pytest.fixture(scope="module")
def made():
    rng = np.random.default_rng(3)
    query, key = 2 * rng.standard_normal((2, 2, 3, 130, 16))
    options = {"causal": True, "sinks": np.array([0.0, 1.0, 2.0])}
    W = attnc.AttentionWeights(query, key, **options)
    return attnc.explorer(W, [f"▁w{i}" for i in range(130)], row=-1), np.asarray(W)


def test_every_row_has_its_largest_weights(made):
    data, weights = inside(made[0]), made[1].reshape(6, 130, 130)
    assert (data["layers"], data["heads"], data["rows"], data["keys"], data["top"]) == (2, 3, 130, 130, 8)
    for head, row in ((0, 0), (2, 3), (4, 77), (5, 129)):
        order = np.argsort(-weights[head, row], kind="stable")[:8]
        wanted = [(key, weights[head, row, key]) for key in order if weights[head, row, key] > 1e-8]
        found = best(data, head, row)
        assert [key for key, _ in found] == [key for key, _ in wanted][:len(found)]
        assert len(found) >= len(wanted) - 1        # what rounds to nothing is left out
        np.testing.assert_allclose([w for _, w in found], [w for _, w in wanted][:len(found)], atol=4e-5)


def test_maps_entropies_and_shares(made):
    data, weights = inside(made[0]), made[1].reshape(6, 130, 130)
    rows, keys = data["bins"]
    assert (rows, keys) == (96, 96)
    levels = array(data["maps"], np.uint8).reshape(6, rows, keys)
    where = np.arange(130) * 96 // 130
    for head in (0, 5):
        pooled, allowed = np.zeros((96, 96)), np.zeros((96, 96), bool)
        for i, j in np.ndindex(130, 130):
            pooled[where[i], where[j]] += weights[head, i, j] / (where == where[i]).sum()
            allowed[where[i], where[j]] |= j <= i
        assert ((levels[head] > 0) == allowed).all()
        shown = ((levels[head] - 1.0) / 254) ** 4 * data["largest"][head]
        assert np.abs(np.sqrt(shown[allowed]) - np.sqrt(pooled[allowed])).max() <= np.sqrt(data["largest"][head]) / 254
        entropy, first, none, _ = data["rowData"][head]
        missing = 1 - weights[head].sum(-1)
        with np.errstate(all="ignore"):
            exact = -np.nansum(weights[head] * np.log(weights[head]), -1) - missing * np.log(missing)
        np.testing.assert_allclose(array(entropy, "<f4"), exact, atol=1e-5)
        np.testing.assert_allclose(array(none, "<u2") / 65535, missing, atol=1e-5)
        np.testing.assert_allclose(array(first, "<u2") / 65535, weights[head, :, 0], atol=1e-5)
        previous = weights[head].diagonal(-1).sum() / 130
        assert abs(data["statistics"]["previous"]["values"][head] - previous) < 2e-5
    assert data["tokens"][:2] == ["w0", "w1"] and data["same"] and data["row"] == 129


def test_twelve_layers_of_twelve_heads_and_512_tokens_take_less_than_6_mb(seed):
    """From one layer: each further one adds what one and two differ by."""
    query, key = np.random.default_rng(seed).standard_normal((2, 12, 512, 8), dtype=np.float32)
    weights = attnc.attention_weights(query, key)
    one, two = (len(attnc.explorer([weights] * n, ["注意力"] * 512).html.encode()) for n in (1, 2))
    assert one + 11 * (two - one) < 6_000_000


def test_lazy_and_dense_give_the_same_page(seed):
    query, key = np.random.default_rng(seed).standard_normal((2, 3, 40, 8))
    W = attnc.AttentionWeights(query, key, causal=True)
    lazy, dense = inside(attnc.explorer(W)), inside(attnc.explorer(np.asarray(W), mask=np.tri(40, dtype=bool)))
    layered = inside(attnc.explorer([W.head(0), W.head(1)]))
    assert (layered["layers"], layered["heads"]) == (2, 1)
    for name in ("maps", "bins", "tokens", "statistics"):
        assert lazy[name] == dense[name]
    assert [part[3] for part in lazy["rowData"]] == [part[3] for part in dense["rowData"]]


class Parser(html.parser.HTMLParser):
    """All tags with their attributes."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def test_the_page_needs_no_network_and_names_its_parts(made):
    page = made[0]
    tags = Parser(page.html).tags
    for _, attributes in tags:
        for name in ("src", "href"):
            assert attributes.get(name, "data:").startswith("data:")
    program = page.html.partition('id="data">')[0] + page.html.rpartition("<script>")[2]
    assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttpRequest|import\(", program)
    [policy] = [attributes["content"] for tag, attributes in tags if attributes.get("http-equiv")]
    assert "default-src 'none'" in policy
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    named = [attributes["aria-labelledby"] for _, attributes in tags if "aria-labelledby" in attributes]
    assert named and set(named) <= set(ids)
    assert set(re.findall(r'\$\("([\w-]+)"\)', page.html)) <= set(ids)
    assert ("html", {"lang": "en"}) in tags and "prefers-color-scheme: dark" in page.html


def test_tokens_and_titles_cannot_end_their_place():
    evil = ["</script><script>alert(1)</script>", "<b>", "\u2028", '"']
    page = attnc.explorer(np.eye(4), evil, title="<img src=x onerror=alert(1)> 100%")
    assert inside(page)["tokens"][:2] == evil[:2]
    assert [tag for tag, _ in Parser(page.html).tags].count("script") == 2
    assert not [tag for tag, _ in Parser(page.html).tags if tag == "img"]


def test_rows_that_see_nothing_and_rows_of_nan():
    weights = np.array([[[0.25, 0.75, 0, 0], [0, 0, 0, 0], [np.nan] * 4]])
    data = inside(attnc.explorer(weights))
    entropy = array(data["rowData"][0][0], "<f4")
    assert entropy[1] == 0 and np.isnan(entropy[2])
    assert [len(best(data, 0, row)) for row in range(3)] == [2, 0, 0]
    assert (array(data["maps"], np.uint8).reshape(3, 4)[1:] == 0).all()


def test_a_notebook_gets_a_frame_and_repr_says_what_it_is():
    page = attnc.explorer(np.full((3, 2, 2), 0.5), ["a", "b"], title='"quoted"')
    [(_, attributes)] = [part for part in Parser(page._repr_html_()).tags if part[0] == "iframe"]
    assert attributes["srcdoc"] == page.html and attributes["sandbox"] == "allow-scripts"
    assert attributes["title"] == '"quoted": 1 layer, 3 heads, 2 queries, 2 keys'
    assert "<title>&quot;quoted&quot;: 1 layer, 3 heads, 2 queries, 2 keys</title>" in page.html
    assert re.fullmatch(r"Page\(1 layer, 3 heads, 2 queries, 2 keys: \d+ kB\)", repr(page))


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    page = attnc.explorer(np.eye(2), path=path)
    assert path.read_text(encoding="utf-8") == page.html and isinstance(page, Page)
    assert repr(page).endswith(f" kB; written, open {path.resolve().as_uri()})")
    monkeypatch.setattr("os.replace", lambda *names: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        attnc.explorer(np.eye(3), path=path)
    assert path.read_text(encoding="utf-8") == page.html
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


def test_progress_goes_from_the_first_layer_to_the_last():
    rng = np.random.default_rng(0)
    layers = [attnc.AttentionWeights(*rng.standard_normal((2, 3, 40, 8))) for _ in range(4)]
    told = []
    page = attnc.explorer(layers, progress=lambda done, total: told.append(done / total))
    assert told == sorted(told) and told[-1] == 1 and len(told) >= 4
    assert page.html == attnc.explorer(layers).html
    attnc.explorer(np.eye(3), progress=lambda done, total: told.append(2))       # dense weights: no work to report
    with pytest.raises(TypeError, match="progress must be"):
        attnc.explorer(layers, progress=3)


@pytest.mark.parametrize(("options", "error", "text"), [
    ({"bins": 0}, ValueError, "bins must be an integer from 1 to 4, got 0"),
    ({"bins": (5, 1)}, ValueError, "row_bins must be an integer from 1 to 4, got 5"),
    ({"top": 0}, ValueError, "top must be an integer from 1 to 64, got 0"),
    ({"row": 4}, ValueError, "row must be an integer from -4 to 3, got 4"),
    ({"head": 1}, ValueError, "head must be an integer from 0 to 0, got 1"),
    ({"tokens": ["a"] * 3}, ValueError, "tokens must be as many as the queries, 4, got 3"),
    ({"key_tokens": ["a"] * 5}, ValueError, "key_tokens must be as many as the keys, 4, got 5"),
    ({"tokens": 3}, TypeError, "tokens must be a list of str"),
])
def test_bad_input(options, error, text, tmp_path):
    path = tmp_path / "page.html"
    with pytest.raises(error, match=text):
        attnc.explorer(np.eye(4), path=path, **options)
    assert not path.exists()


def test_too_many_keys_are_refused_before_any_work():
    long = np.zeros((1, 2**16 + 1, 1), np.float32)
    with pytest.raises(ValueError, match="at most 65536 keys"):
        attnc.explorer(attnc.AttentionWeights(long[:, :1], long))


def test_distances_are_left_out_where_the_keys_are_another_text():
    weights, words = np.full((3, 3), 1 / 3), list("abc")
    own, cross = attnc.explorer(weights, words), attnc.explorer(weights, words, key_tokens=list("xyz"))
    assert list(inside(own)["statistics"]) == ["entropy", "distance", "first", "previous"]
    assert list(inside(cross)["statistics"]) == ["entropy", "first"]


def test_a_page_opens_at_a_head_and_at_its_most_telling_row():
    """Row 1 of a causal head has large weights because it sees two keys; row 6 chooses one key of seven."""
    weights = np.tri(8) / np.arange(1, 9)[:, None]
    weights[1, :2], weights[6, :7] = (0.3, 0.7), 0.05
    weights[6, 3] = 0.7
    layers = np.stack([np.tri(8) / np.arange(1, 9)[:, None]] * 6).reshape(2, 3, 8, 8)
    layers[1, 2] = weights
    data = inside(attnc.explorer(layers, head=(1, 2)))
    assert (data["head"], data["row"]) == (5, 6)
    assert inside(attnc.explorer(layers, head=(1, 2), row=-3))["row"] == 5
    assert inside(attnc.explorer(layers))["head"] == 0
    with pytest.raises(ValueError, match="head must be a pair"):
        attnc.explorer(layers, head=1)
    for small in (np.ones((1, 1)), np.ones((3, 1)), np.full((2, 2), np.nan), np.zeros((2, 2))):
        assert inside(attnc.explorer(small))["row"] in (0, 1)


def test_colours_end_at_a_percentile_of_the_cells_without_the_first_key(seed):
    weights = np.random.default_rng(seed).dirichlet(np.ones(40), size=(2, 40))
    weights = weights * np.tri(40) / (weights * np.tri(40)).sum(-1, keepdims=True)
    data = inside(attnc.explorer(weights))
    for head in (0, 1):
        seen = [weights[head, i, j] for i in range(40) for j in range(1, i + 1)]
        assert np.isclose(data["high"][head], np.percentile(seen, data["percentile"]))
        assert data["largest"][head] == 1 > 2 * data["high"][head]      # the first row has all of its weight on a key
    assert inside(attnc.explorer(np.eye(1)))["high"] == [1]


def test_weights_of_every_float_type_make_the_page_of_float64(seed):
    weights = np.random.default_rng(seed).dirichlet(np.ones(5), size=5)
    wanted = attnc.explorer(weights).html
    for same in (weights.astype(np.longdouble), weights.astype(">f8"), weights.tolist(), np.ma.array(weights)):
        assert attnc.explorer(same).html == wanted


def test_control_characters_are_escaped_in_tokens_and_titles(tmp_path):
    evil = ["\x1b]0;title\x07", "\ud800", "a\u202eb\u200b", "\x9b2J"]
    page = attnc.explorer(np.eye(4), evil, title="\x1b[2J \u2066title\udc80", path=tmp_path / "page.html")
    assert inside(page)["tokens"] == [r"\x1b]0;title\x07", r"\ud800", r"a\u202eb\u200b", r"\x9b2J"]
    assert r"<h1>\x1b[2J \u2066title\udc80</h1>" in page.html
    bad = {sign for sign in page.html if not sign.isprintable()} - {"\n"}
    assert not bad


def test_a_token_of_100_000_letters_does_not_make_a_page_of_them():
    page = attnc.explorer(np.eye(2), ["a" * 100_000, "b"])
    assert len(page.html) < 60_000 and inside(page)["tokens"][0] == "a" * 199 + "…"
