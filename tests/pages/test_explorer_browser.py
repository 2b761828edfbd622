"""The explorer's page in a real Chromium: no errors, no network, the right numbers by mouse and by keyboard."""

import re
import shutil
import time
from itertools import pairwise

import numpy as np
import pytest

import attnc
import attnc.datasets

pytestmark = pytest.mark.peers

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with api.sync_playwright() as playwright:
        # Containers run tests as root, and Chromium's own sandbox refuses that. The page is ours.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def show(browser, tmp_path):
    """Open a page from a file; what it logs, throws or asks of the network ends the test."""
    said, pages = [], []

    def show(page, width=1300, scheme="light", touch=False):
        path = page.save(tmp_path / "page.html")
        tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, has_touch=touch)
        pages.append(tab)
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on("request", lambda request: request.url.startswith(("file:", "data:")) or said.append(request.url))
        tab.goto(path.as_uri())
        return tab

    yield show
    for tab in pages:
        tab.close()
    assert said == []


@pytest.fixture(scope="module")
def turkish():
    data = attnc.datasets.load("turkish")
    weights = attnc.attention_weights(data.query, data.key)
    return attnc.explorer(attnc.AttentionWeights(data.query, data.key), data.tokens, row=0), weights, data


def listed(tab):
    """(word, weight) of the list of largest weights."""
    return [(item.locator("bdi").inner_text(), float(item.locator("b").inner_text()))
            for item in tab.locator("#top li").all()]


def expected(weights, head, row, names, count=8):
    order = np.argsort(-weights[head, row], kind="stable")[:count]
    return [(names[key], weights[head, row, key]) for key in order]


def agree(got, wanted):
    assert [name for name, _ in got] == [name for name, _ in wanted]
    np.testing.assert_allclose([w for _, w in got], [w for _, w in wanted], atol=1.5e-4)


def click(tab, row, rows, column=0.5):
    """Click the map at a row."""
    box = tab.locator("#frame").bounding_box()
    tab.mouse.click(box["x"] + column * box["width"], box["y"] + (row + 0.5) / rows * box["height"])


def test_a_click_shows_the_right_numbers(show, turkish):
    page, weights, data = turkish
    names = [token.lstrip("▁") for token in data.tokens]
    tab = show(page)
    tab.locator("#heads button").nth(3).click()
    click(tab, 5, 11)
    tab.mouse.move(0, 0)
    assert tab.locator("#word").inner_text() == "onu" and tab.locator("#map-name").inner_text().startswith("Head 3: ")
    agree(listed(tab), expected(weights, 3, 5, names))
    assert tab.locator("#entropy").inner_text() == "1.88 nats" and tab.locator("#effective").inner_text() == "6.6"
    assert f"first key, <s>: {100 * weights[3, 5, 0]:.1f} %" in tab.locator("#share-legend").inner_text()
    tab.locator("#words bdi").nth(7).click()
    agree(listed(tab), expected(weights, 3, 7, names))
    assert tab.evaluate("getComputedStyle(words.get(7)).outlineStyle") == "solid"


def test_pointing_previews_a_row_and_leaving_goes_back(show, turkish):
    page, weights, data = turkish
    names = [token.lstrip("▁") for token in data.tokens]
    tab = show(page)
    click(tab, 2, 11)
    box = tab.locator("#frame").bounding_box()
    tab.mouse.move(box["x"] + 40, box["y"] + 9.5 / 11 * box["height"])
    agree(listed(tab), expected(weights, 0, 9, names))
    assert re.fullmatch(r"row 9, \. → key \d+, .*: \d+\.\d %", tab.locator("#cell").inner_text())
    tab.mouse.move(2, 2)
    agree(listed(tab), expected(weights, 0, 2, names))


def test_everything_can_be_reached_with_the_keyboard(show, turkish):
    page, weights, data = turkish
    names = [token.lstrip("▁") for token in data.tokens]
    tab = show(page)
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.id") == "order"
    tab.keyboard.press("Tab")
    for key in ("ArrowRight", "ArrowDown", "ArrowLeft", "ArrowRight"):
        tab.keyboard.press(key)
    head = tab.evaluate("state.head")
    assert head == 5 and tab.locator("#heads button[aria-checked=true]").count() == 1
    assert tab.evaluate("document.activeElement.getAttribute('aria-label')") == "Head 5"
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    tab.keyboard.press("Tab")
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.id") == "frame"
    for key in ("ArrowDown", "ArrowDown", "End", "ArrowUp"):
        tab.keyboard.press(key)
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    agree(listed(tab), expected(weights, 5, 9, names))
    frame = tab.locator("#frame")
    assert frame.get_attribute("aria-valuenow") == "9" and frame.get_attribute("aria-valuetext").startswith("row 9, .")
    assert tab.locator("#live").inner_text().startswith("row 9, .: ")
    tab.keyboard.press("Tab")
    tab.keyboard.press("Control+A")
    tab.keyboard.type("4")
    agree(listed(tab), expected(weights, 5, 4, names))


def test_heads_are_sorted_by_a_statistic_on_the_screen_and_in_the_document(show, turkish):
    page, weights, _ = turkish
    tab = show(page)
    entropy = -(weights.astype(float) * np.log(weights)).sum(-1).mean(-1)
    tab.select_option("#order", "entropy")
    wanted = [f"Head {head}" for head in np.argsort(entropy)]
    assert [b.get_attribute("aria-label") for b in tab.locator("#heads button").all()] == wanted
    boxes = [button.bounding_box() for button in tab.locator("#heads button").all()]
    assert [(box["y"], box["x"]) for box in boxes] == sorted((box["y"], box["x"]) for box in boxes)
    assert f"{entropy.min():.2f} nats" in tab.locator("#heads button").first.inner_text()
    tab.select_option("#order", "")
    assert [b.get_attribute("aria-label") for b in tab.locator("#heads button").all()] == sorted(
        wanted, key=lambda name: int(name.split()[1]))


def test_masked_cells_sinks_and_long_sequences(show, seed):
    query, key = np.random.default_rng(seed).standard_normal((2, 2, 2, 300, 8))
    W = attnc.AttentionWeights(query, key, causal=True, sinks=np.array([1.0, 3.0]))
    dense = np.asarray(W)
    tab = show(attnc.explorer(W))
    tab.locator("#heads button").nth(3).click()
    click(tab, 150, 300, column=0.9)
    row = int(tab.locator("#number").input_value())
    agree(listed(tab), expected(dense[1], 1, row, [f"key {i}" for i in range(300)]))
    assert f"no key (sink) {100 * (1 - dense[1, 1, row].sum()):.1f} %" in tab.locator("#share-legend").inner_text()
    assert tab.locator("#cell").inner_text().endswith("not allowed")
    pixels = tab.evaluate("[...$('cells').getContext('2d').getImageData(0, 0, 96, 96).data]")
    assert [value > 0 for value in pixels[3::4]] == [j <= i for i in range(96) for j in range(96)]


def test_the_colours_of_cells_are_those_of_their_weights(show, turkish):
    from attnc._views.colours import ramp

    page, weights, _ = turkish
    for scheme in ("light", "dark"):
        tab = show(page, scheme=scheme)
        tab.locator("#heads button").nth(2).click()
        data = tab.evaluate("$('cut').checked = false, drawMap(),"
                            " [...$('cells').getContext('2d').getImageData(0, 0, 11, 11).data]")
        shown = np.array(data).reshape(11, 11, 4)[..., :3]
        wanted = ramp(scheme == "dark")[np.round(255 * np.sqrt(weights[2] / weights[2].max())).astype(int)].astype(int)
        # A step of a byte of the fourth root is at most two of the square root, of 255 colours that are alike.
        assert np.abs(shown - wanted).max() <= 2 * np.abs(np.diff(ramp(scheme == "dark").astype(int), axis=0)).max()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 800, 1300])
def test_nothing_is_cut_off_and_text_has_contrast(show, scheme, width):
    tokens = ["▁Ayşe", "▁القطة", "注意力机制", "▁הספר", "donaudampfschifffahrtsgesellschaft", "<b>&amp;"]
    tab = show(attnc.explorer(np.full((2, 3, 6, 6), 1 / 6), tokens), width, scheme)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    low = tab.evaluate("""() => {
        const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
        const bytes = (...colours) => {
            canvas.clearRect(0, 0, 1, 1);
            for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
            return [...canvas.getImageData(0, 0, 1, 1).data];
        };
        const linear = v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
        const light = ([r, g, b]) => .2126 * linear(r / 255) + .7152 * linear(g / 255) + .0722 * linear(b / 255);
        const found = [];
        for (const element of document.querySelectorAll("body *")) {
            const own = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
            if (!own || !element.checkVisibility() || element.closest("#live, script, style, option")) continue;
            const layers = [];
            for (let up = element; up; up = up.parentElement) layers.unshift(getComputedStyle(up).backgroundColor);
            const paper = light(bytes("white", ...layers)), ink = light(bytes(getComputedStyle(element).color));
            const ratio = (Math.max(paper, ink) + .05) / (Math.min(paper, ink) + .05);
            if (ratio < 4.5) found.push([element.tagName, element.textContent.slice(0, 30), ratio]);
        }
        return found;
    }""")
    assert low == []
    for axis in ("#x-axis", "#y-axis"):
        boxes = [span.bounding_box() for span in tab.locator(f"{axis} span:not(.here)").all()]
        assert len(boxes) > 1
        assert all(box["width"] > 0 and box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)
        start, size = ("x", "width") if axis == "#x-axis" else ("y", "height")
        for one, other in pairwise(boxes):
            assert one[start] + one[size] <= other[start] + 1
    assert [name for name, _ in listed(tab)][:4] == ["Ayşe", "القطة", "注意力机制", "הספר"]


def test_twelve_layers_of_twelve_heads_and_512_tokens_answer_at_once(show, seed):
    query, key = np.random.default_rng(seed).standard_normal((2, 12, 512, 8), dtype=np.float32)
    weights = attnc.attention_weights(query, key)
    page = attnc.explorer([weights] * 12, [f"▁word{i}" for i in range(512)], row=0)
    assert len(page.html.encode()) < 6_000_000
    tab = show(page)
    assert tab.locator("#heads button").count() == 144
    tab.locator("#heads button").nth(140).click()
    tab.locator("#frame").focus()
    began = time.monotonic()
    for _ in range(20):
        tab.keyboard.press("ArrowDown")
    print(f" [20 rows of a page of {len(page.html) / 1e6:.1f} MB: {time.monotonic() - began:.2f} s]", end="")
    agree(listed(tab), expected(weights, 8, 20, [f"word{i}" for i in range(512)]))


def test_a_notebook_frame_works_inside_a_page(browser, turkish, tmp_path):
    said = []
    path = tmp_path / "notebook.html"
    head = "<!DOCTYPE html><meta charset=utf-8><title>notebook</title>"
    path.write_text(head + turkish[0]._repr_html_(), encoding="utf-8")
    tab = browser.new_page()
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.goto(path.as_uri())
    frame = tab.frame_locator("iframe")
    assert frame.locator("#heads button").count() == 12
    frame.locator("#heads button").nth(3).click()
    assert frame.locator("#map-name").inner_text().startswith("Head 3: ")
    tab.close()
    assert said == []


def test_a_finger_reads_a_cell_and_keeps_its_row(show, turkish):
    page, weights, data = turkish
    names = [token.lstrip("▁") for token in data.tokens]
    tab = show(page, 390, touch=True)
    box = tab.locator("#frame").bounding_box()
    for row, key in ((5, 2), (9, 0)):
        at = {"x": (key + 0.5) / 11 * box["width"], "y": (row + 0.5) / 11 * box["height"]}
        tab.locator("#frame").tap(position=at)
        said = tab.locator("#cell").inner_text()
        name, share = re.fullmatch(rf"row {row}, {re.escape(names[row])} → key {key}, (.*): (\S+) %", said).groups()
        assert name == names[key] and abs(float(share) / 100 - weights[0, row, key]) < 0.01 * weights[0].max()
        assert tab.evaluate("state.pinned") == row
        agree(listed(tab), expected(weights, 0, row, names))


def test_the_title_says_which_head_of_what(show, turkish):
    tab = show(attnc.explorer(turkish[1], turkish[2].tokens, head=4, title="kitap"))
    assert tab.title() == "Head 4 · kitap: 1 layer, 12 heads, 11 queries, 11 keys"
    assert tab.locator("#map-name").inner_text() == "Head 4: weight of each query on each key"
    tab.locator("#heads button").nth(7).click()
    assert tab.title().startswith("Head 7 · ")


def test_a_causal_map_has_colours_up_to_a_percentile(show, seed):
    """The first row has all of its weight on one key; in colours up to 1 the others would be white."""
    query, key = np.random.default_rng(seed).standard_normal((2, 2, 200, 8), dtype=np.float32) / 4
    tab = show(attnc.explorer(attnc.AttentionWeights(query, key, causal=True), head=1))
    assert tab.evaluate("state.head") == 1 and tab.locator("#cut").is_checked()
    red = """() => { const copy = new OffscreenCanvas(keyBins, rowBins).getContext("2d");
        copy.drawImage($("cells"), 0, 0);
        const {data: pixels} = copy.getImageData(0, 0, keyBins, rowBins);
        const seen = [...pixels].filter((_, at) => at % 4 === 0 && pixels[at + 3]).sort((a, b) => a - b);
        return seen[seen.length >> 1]; }"""
    cut = tab.evaluate(red)
    assert tab.locator("#ticks span").last.inner_text().startswith("≥ ")
    tab.locator("#cut").uncheck()
    print(f" [red of the median cell: {cut}, up to the largest weight {tab.evaluate(red)}]", end="")
    assert cut < 128 < 160 < tab.evaluate(red)
    assert tab.locator("#ticks span").last.inner_text() == "1"


@pytest.mark.parametrize("width", [390, 800, 1090, 1300])
def test_labels_of_32_by_32_heads_do_not_collide(show, width):
    tab = show(attnc.explorer(np.full((32, 32, 4, 4), 0.25)), width)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    labels = [span.bounding_box() for span in tab.locator("#heads > span").all() if span.inner_text()]
    # The text of a label is narrower than its box only where the box is cut: measure the text.
    wide = tab.evaluate("""() => [...document.querySelectorAll("#heads > span")].filter(span => span.textContent).map(
        span => { const range = document.createRange(); range.selectNodeContents(span);
                  const {x, y, width, height} = range.getBoundingClientRect(); return [x, y, width, height]; })""")
    assert len(labels) == len(wide) >= 32 + 8
    for at, (x, y, w, h) in enumerate(wide):
        for x2, y2, w2, h2 in wide[:at]:
            assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 + 1 or y2 + h2 <= y + 1
    maps = [button.bounding_box() for button in tab.locator("#heads button").all()[:33]]
    assert all(box["width"] >= 10 and box["height"] >= 10 for box in maps)


def test_a_text_of_more_tokens_than_a_page_can_lay_out_shows_those_around_the_row(show, seed):
    query, key = np.random.default_rng(seed).standard_normal((2, 9000, 4), dtype=np.float32)
    tab = show(attnc.explorer(attnc.AttentionWeights(query, key), [f"t{i}" for i in range(9000)], row=7000, bins=8))
    words = tab.locator("#words bdi")
    assert words.count() == 4096 and tab.locator("#words .query").inner_text() == "t7000"
    assert tab.locator("#part").inner_text().startswith("Tokens 4,904 to 8,999 of 9,000: those around the row")
    tab.locator("#number").fill("12")
    assert tab.locator("#words .query").inner_text() == "t12" and words.first.inner_text() == "t0"
    others = attnc.explorer(attnc.AttentionWeights(query[:3], key), key_tokens=[f"k{i}" for i in range(9000)], bins=3)
    tab = show(others)
    best = tab.evaluate("topOf(state.head, state.row)[0].key")
    assert tab.locator(f"#words bdi[title='key {best}']").get_attribute("style")
    assert "those around the key of its largest weight" in tab.locator("#part").inner_text()


def test_no_control_character_is_obeyed(show):
    tab = show(attnc.explorer(np.eye(3), ["\u202eevil", "\x1b[2J", "\ud800"], title="\u202etitle"))
    assert tab.locator("h1").inner_text() == r"\u202etitle"
    assert tab.locator("#words bdi").all_inner_texts() == [r"\u202eevil", r"\x1b[2J", r"\ud800"]
