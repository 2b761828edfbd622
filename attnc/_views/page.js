"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const {layers, heads, rows, keys, bins: [rowBins, keyBins], top: most, weightBits} = data;
const title = document.title;
const $ = id => document.getElementById(id);
const dark = matchMedia("(prefers-color-scheme: dark)");
const bytes = text => Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
const maps = bytes(data.maps);
const weightMax = 2 ** weightBits - 1;
// As many decimals as the bits of a weight are good for; smaller weights have one digit that counts.
const digits = Math.max(2, Math.min(4, Math.floor(weightBits * Math.log10(2))));
const percent = share => (100 * share).toFixed(1) + " %";
const queryName = at => data.tokens ? data.tokens[at] : "row " + at;
const named = Boolean(data.keyTokens || data.same);
const keyName = at => data.keyTokens ? data.keyTokens[at] : data.same ? data.tokens[at] : "key " + at;
const shows = "weight of each query on each key";
const binStart = (bin, count, length) => Math.ceil(bin * length / count);
const state = {head: data.head, row: data.row, pinned: data.row};

// What a head has for each row, decoded when it is first looked at.
const decoded = new Map();
function rowsOf(head) {
  if (!decoded.has(head)) {
    const u16 = text => text ? new Uint16Array(bytes(text).buffer) : null;
    const [entropy, first, none, best] = data.rowData[head];
    decoded.set(head, {entropy: new Float32Array(bytes(entropy).buffer), first: u16(first), none: u16(none),
                       best: bytes(best)});
  }
  return decoded.get(head);
}

function topOf(head, row) {
  const {best} = rowsOf(head), found = [];
  for (let at = 3 * most * row; at < 3 * most * (row + 1); at += 3) {
    const code = best[at] | best[at + 1] << 8 | best[at + 2] << 16, part = code & weightMax;
    if (part) found.push({key: code >>> weightBits, weight: (part / weightMax) ** 2});
  }
  return found;
}

// Colours
const ramps = [data.colours.light, data.colours.dark].map(text => bytes(text));
const ramp = () => ramps[dark.matches ? 1 : 0];

const weightOf = (level, head) => ((level - 1) / 254) ** 4 * data.largest[head];
// Where most cells are a small part of the largest, as in causal models, colours end at a percentile of them.
const needsCut = head => 2 * data.high[head] < data.largest[head];
const endOf = (head, cut) => cut ? Math.min(data.high[head], data.largest[head]) : data.largest[head];

function paint(canvas, head, end) {
  canvas.width = keyBins;
  canvas.height = rowBins;
  const image = new ImageData(keyBins, rowBins), pixels = image.data, colours = ramp();
  const from = head * rowBins * keyBins;
  const steps = Uint8Array.from({length: 256}, (_, level) => Math.min(255, Math.round(
    255 * Math.sqrt(weightOf(level, head) / end))));
  for (let at = 0; at < rowBins * keyBins; at++) {
    const level = maps[from + at];
    if (!level) continue;       // not allowed: the hatching behind the canvas is seen
    const colour = 3 * steps[level];
    pixels[4 * at] = colours[colour];
    pixels[4 * at + 1] = colours[colour + 1];
    pixels[4 * at + 2] = colours[colour + 2];
    pixels[4 * at + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

const cell = (head, row, key) => {
  const level = maps[(head * rowBins + row) * keyBins + key];
  return level ? weightOf(level, head) : null;
};

// Heads
const place = head => [Math.floor(head / heads), head % heads];
const headName = head => (layers > 1 ? `Layer ${place(head)[0]}, head ` : "Head ") + place(head)[1];
const buttons = [];
function buildHeads() {
  const box = $("heads"), grid = layers > 1;
  const columns = grid ? heads : Math.min(heads, 4);
  // Maps narrower than 10 pixels show nothing: then the box scrolls.
  box.style.setProperty("--columns", (grid ? "2.2em " : "") + `repeat(${columns}, minmax(10px, ${grid ? 52 : 110}px))`);
  const label = text => {
    const span = document.createElement("span");
    span.textContent = text;
    span.ariaHidden = "true";
    box.append(span);
  };
  document.querySelector("main").classList.toggle("many", columns > 16);
  if (grid) ["", ...Array(heads).keys()].forEach(label);
  for (let head = 0; head < layers * heads; head++) {
    if (grid && head % heads === 0) label("L" + place(head)[0]);
    const button = document.createElement("button"), canvas = document.createElement("canvas");
    const small = document.createElement("small");
    button.type = "button";
    button.setAttribute("aria-label", headName(head));
    button.setAttribute("role", "radio");
    canvas.className = "map";
    button.append(canvas, small);
    button.addEventListener("click", () => chooseHead(head));
    buttons.push(button);
    box.append(button);
  }
  for (const [name, {label, unit, sort}] of Object.entries(data.statistics)) {
    $("order").append(new Option(`${label}, ${sort > 0 ? "smallest" : "largest"} first`, name));
  }
  buttons.forEach((button, head) => { button.title = headName(head) + ": " + factsOf(head); });
  $("order").prepend(new Option(layers > 1 ? "layer and head" : "head", "", true, true));
  box.addEventListener("keydown", event => {
    const shown = ordered(), at = shown.indexOf(state.head), sorted = $("order").value;
    const wide = getComputedStyle(box).gridTemplateColumns.split(" ").length - (grid && !sorted ? 1 : 0);
    const step = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: wide, ArrowUp: -wide}[event.key];
    const to = event.key === "Home" ? 0 : event.key === "End" ? shown.length - 1 : at + step;
    if (!(to >= 0 && to < shown.length)) return;
    event.preventDefault();
    chooseHead(shown[to]);
    buttons[shown[to]].focus();
  });
}

function ordered() {
  const all = [...buttons.keys()], name = $("order").value;
  if (!name) return all;
  const {values, sort} = data.statistics[name];
  return all.sort((a, b) => sort * (values[a] - values[b]) || a - b);
}

function arrange() {
  const name = $("order").value, box = $("heads"), statistic = data.statistics[name];
  box.classList.toggle("sorted", Boolean(name));
  ordered().forEach((head, at) => {
    const [layer, index] = place(head);
    buttons[head].style.order = name ? at : 0;
    buttons[head].lastChild.textContent = (layers > 1 ? `L${layer} H${index}` : `H${index}`) +
      (name ? `\n${format(statistic, head)}` : "");
    buttons[head].lastChild.style.whiteSpace = "pre-line";
  });
  // The order of the tab key and of the screen is one: buttons move in the document too.
  if (name) ordered().forEach(head => box.append(buttons[head]));
  else {
    const labels = [...box.querySelectorAll("span")];
    box.append(...(layers > 1 ? labels.slice(0, heads + 1) : []));
    buttons.forEach((button, head) => {
      if (layers > 1 && head % heads === 0) box.append(labels[heads + 1 + head / heads]);
      box.append(button);
    });
  }
}

// Numbers of the columns of heads, as many as there is room for.
function thinLabels() {
  if (layers === 1) return;
  const labels = [...$("heads").querySelectorAll("span")].slice(1, heads + 1), room = labels[0].clientWidth + 2;
  const wide = 7 * String(heads - 1).length + 2, step = [1, 2, 4, 8, 16, 32].find(step => step * room >= wide) || heads;
  labels.forEach((label, head) => { label.textContent = head % step ? "" : head; });
}

const factsOf = head => Object.values(data.statistics).map(
  statistic => `${statistic.label} ${format(statistic, head)}`).join(", ");
const format = ({unit, values}, head) => unit === "share" ? percent(values[head]) : values[head].toFixed(2) + unit;

function chooseHead(head) {
  state.head = head;
  buttons.forEach((button, at) => {
    button.setAttribute("aria-checked", at === head);
    button.tabIndex = at === head ? 0 : -1;
  });
  $("map-name").textContent = headName(head) + ": " + shows;
  document.title = headName(head) + " · " + title;
  $("facts").textContent = "Mean over rows: " + factsOf(head);
  $("cut").checked = needsCut(head);
  $("cell").textContent = "";
  drawMap();
  showRow(state.row);
}

// Map
function drawMap() {
  const largest = endOf(state.head, $("cut").checked);
  paint($("cells"), state.head, largest);
  const context = $("ramp").getContext("2d"), line = new ImageData(256, 1), colours = ramp();
  for (let at = 0; at < 256; at++) line.data.set([...colours.subarray(3 * at, 3 * at + 3), 255], 4 * at);
  context.putImageData(line, 0, 0);
  const more = largest < data.largest[state.head] ? "≥ " : "";
  const parts = $("ticks").clientWidth < 260 ? [0, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1];
  $("ticks").replaceChildren(...parts.map(part => {
    const span = document.createElement("span"), weight = part * part * largest;
    span.textContent = (part === 1 ? more : "") + Number(weight.toPrecision(2));
    span.style.left = 100 * part + "%";
    return span;
  }));
  $("ramp").setAttribute("aria-label", `Square-root colours from 0 to ${largest.toPrecision(3)}`);
}

function labelAxis(axis, length, name, named, across) {
  const size = across ? axis.clientHeight : axis.clientWidth, needed = named || across ? 15 : 36;
  const steps = [1, 2, 5].flatMap(step => [...Array(7).keys()].map(power => step * 10 ** power)).sort((a, b) => a - b);
  const step = steps.find(step => length / step * needed <= size) || length;
  axis.replaceChildren();
  axis.classList.toggle("numbers", !named);
  for (let at = 0; at < length; at += step) axis.append(axisLabel(at, length, named ? name(at) : at, across));
}

function axisLabel(at, length, text, across) {
  const span = document.createElement("span");
  span.textContent = text;
  span.dir = "auto";
  span.dataset.at = at;
  span.style[across ? "top" : "left"] = 100 * (at + 0.5) / length + "%";
  return span;
}

function drawMarks() {
  const canvas = $("marks"), {clientWidth: width, clientHeight: height} = $("frame"), ratio = devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const context = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  context.scale(ratio, ratio);
  context.strokeStyle = style.getPropertyValue("--mark");
  context.lineWidth = 1.6;
  const above = state.row / rows * height, tall = Math.max(height / rows, 3);
  context.strokeRect(0.8, above + (height / rows - tall) / 2, width - 1.6, tall);
  for (const {key, weight} of topOf(state.head, state.row)) {
    context.beginPath();
    context.arc((key + 0.5) / keys * width, (state.row + 0.5) / rows * height, 3 + 9 * Math.sqrt(weight), 0, 7);
    context.stroke();
  }
  const axis = $("y-axis");
  axis.querySelectorAll(".here").forEach(old => old.remove());
  const here = axisLabel(state.row, rows, data.tokens ? queryName(state.row) : state.row, true);
  here.className = "here";
  axis.append(here);
}

// Row
function showRow(row) {
  state.row = row;
  const {entropy, first, none} = rowsOf(state.head), best = topOf(state.head, row);
  const shown = best.reduce((sum, {weight}) => sum + weight, 0), bad = Number.isNaN(entropy[row]);
  $("word").textContent = queryName(row);
  if (document.activeElement !== $("number") || Number($("number").value) !== row) $("number").value = row;
  $("entropy").textContent = bad ? "NaN" : entropy[row].toFixed(2) + " nats";
  $("effective").textContent = bad ? "NaN" : Math.exp(entropy[row]).toFixed(1);
  $("shown-name").textContent = `in the ${best.length} below`;
  $("shown").textContent = percent(Math.min(shown, 1));
  const onFirst = first[row] / 65535, onNone = none ? none[row] / 65535 : 0;
  const listedFirst = best.some(({key}) => key === 0) ? onFirst : 0;
  const others = Math.max(shown - listedFirst, 0);
  const empty = !best.length && !bad, rest = empty ? 0 : Math.max(1 - onNone - onFirst - others, 0);
  const parts = [["none", "no key (sink)", onNone],
                 ["first", named ? `first key, ${keyName(0)}:` : "first key", onFirst],
                 ["top", "other keys below", others], ["rest", "all the rest", rest]];
  const kept = bad || empty && !onNone ? [] : parts.filter(([kind, , share]) => share >= 5e-4 || kind === "first");
  $("share").replaceChildren(...kept.map(([kind, , share]) => {
    const part = document.createElement("i");
    part.className = kind;
    part.style.flex = `0 0 ${100 * share}%`;
    return part;
  }));
  $("share").setAttribute("aria-label", kept.map(([, name, share]) => `${name} ${percent(share)}`).join(", "));
  $("share-legend").replaceChildren(...kept.map(([kind, name, share]) => {
    const item = document.createElement("li"), key = document.createElement("i"), word = document.createElement("bdi");
    key.className = kind;
    word.textContent = name;
    item.append(key, word, " " + percent(share));
    return item;
  }));
  $("top").replaceChildren(...best.map(({key, weight}) => {
    const item = document.createElement("li"), word = document.createElement("bdi");
    const at = document.createElement("small"), number = document.createElement("b");
    word.textContent = keyName(key);
    at.textContent = [key === 0 ? "first key" : "", named ? "key " + key : ""].filter(Boolean).join(" · ");
    number.textContent = weight < 10 ** -digits ? weight.toPrecision(1) : weight.toFixed(digits);
    item.style.setProperty("--width", 100 * weight / best[0].weight + "%");
    item.append(word, at, number);
    return item;
  }));
  $("missing").textContent = bad ? "This row holds NaN." : best.length ? "" : "This row may see no key.";
  $("frame").setAttribute("aria-valuenow", row);
  $("frame").setAttribute("aria-valuetext", spoken(row, best));
  drawMarks();
  markWords(row, best);
}

const spoken = (row, best) => `row ${row}, ${queryName(row)}: ` +
  best.slice(0, 3).map(({key, weight}) => `${keyName(key)} ${percent(weight)}`).join(", ");

function pin(row) {
  state.pinned = Math.max(0, Math.min(rows - 1, row));
  showRow(state.pinned);
  $("live").textContent = spoken(state.pinned, topOf(state.head, state.pinned));
  follow();
}

// Tokens
const WORDS = 4096;             // of a longer text those around the row
const texts = data.same ? data.tokens : data.keyTokens, words = new Map();
function buildWords(from) {
  const to = Math.min(texts.length, from + WORDS);
  words.clear();
  $("words").replaceChildren();
  for (let at = from; at < to; at++) {
    const word = document.createElement("bdi");
    word.textContent = texts[at];
    word.title = `key ${at}`;
    if (data.same) word.addEventListener("click", () => pin(at));
    words.set(at, word);
    $("words").append(word, "\u200b");
  }
  const number = at => at.toLocaleString("en");
  $("part").textContent = texts.length <= WORDS ? "" : `Tokens ${number(from)} to ${number(to - 1)} of ` +
    `${number(texts.length)}: those around the ${data.same ? "row" : "key of its largest weight"}.`;
}

function follow() {
  if (!texts) return;
  const best = topOf(state.head, state.pinned), at = data.same ? state.pinned : best.length ? best[0].key : 0;
  if (!words.has(at)) {
    buildWords(Math.max(0, Math.min(at - WORDS / 2, texts.length - WORDS)));
    markWords(state.row, topOf(state.head, state.row));
  }
  if (data.same) $("words").scrollTop = words.get(at).offsetTop - $("words").offsetTop - 60;
}

let marked = [];
function markWords(row, best) {
  for (const word of marked) {
    word.removeAttribute("style");
    word.classList.remove("query");
  }
  const shown = best.filter(({key}) => words.has(key));
  marked = shown.map(({key, weight}) => {
    const word = words.get(key);
    const strength = Math.sqrt(weight), light = dark.matches ? 0.25 + 0.45 * strength : 0.95 - 0.5 * strength;
    word.style.background = `oklch(${light} ${0.03 + 0.1 * strength} 262)`;
    word.style.color = light > 0.55 ? "#0d1220" : "#fff";
    return word;
  });
  if (data.same && words.has(row)) {
    words.get(row).classList.add("query");
    marked.push(words.get(row));
  }
}

// Together
function drawAll() {
  buttons.forEach((button, head) => paint(button.firstChild, head, endOf(head, needsCut(head))));
  drawMap();
  showRow(state.row);
}

function layOut() {
  thinLabels();
  labelAxis($("y-axis"), rows, queryName, Boolean(data.tokens), true);
  labelAxis($("x-axis"), keys, keyName, named, false);
  const most = (axis, side) => Math.max(...[...axis.children].map(span => span[side]));
  $("map").style.setProperty("--beside", most($("y-axis"), "offsetWidth") + 14 + "px");
  $("map").style.setProperty("--below", most($("x-axis"), "offsetHeight") + 10 + "px");
  drawMarks();
}

$("shape").textContent = (layers > 1 ? `${layers} layers × ` : "") + `${heads} ${heads > 1 ? "heads" : "head"}, ` +
  `${rows.toLocaleString("en")} queries × ${keys.toLocaleString("en")} keys`;
$("under").textContent = (rowBins < rows || keyBins < keys ?
  `A cell is the mean over its rows of their weight on all of its keys (${rowBins} × ${keyBins} cells). ` : "") +
  "Square-root colours. Point at a cell or touch it to read it, click to keep its row; or focus the map and use the " +
  "arrow keys.";
$("number").max = rows - 1;
$("frame").setAttribute("aria-valuemin", 0);
$("frame").setAttribute("aria-valuemax", rows - 1);
if (layers * heads === 1) {
  $("overview").hidden = true;
  document.querySelector("main").className = "single";
}
if (!texts) $("text").hidden = true;
$("text-name").textContent = data.same ? "Tokens: shaded by the weight this row gives them; click one to see its row"
                                       : "Keys: shaded by the weight this row gives them";
$("cut-name").textContent = `colours to the ${data.percentile}th percentile, without the first key`;
buildHeads();
arrange();
chooseHead(state.head);
drawAll();
layOut();
follow();

const rowAt = event => {
  const box = $("frame").getBoundingClientRect();
  return Math.max(0, Math.min(rows - 1, Math.floor((event.clientY - box.top) / box.height * rows)));
};
// The weight of the cell under the pointer or finger, in words.
function readCell(event) {
  const box = $("frame").getBoundingClientRect(), row = rowAt(event);
  const keyBin = Math.min(keyBins - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * keyBins)));
  const rowBin = Math.min(rowBins - 1, Math.floor(row * rowBins / rows)), share = cell(state.head, rowBin, keyBin);
  const range = (bin, count, length, word, name) => {
    const from = binStart(bin, count, length), to = binStart(bin + 1, count, length) - 1;
    if (to > from) return [`${word}s ${from} to ${to}`];
    const bdi = document.createElement("bdi");      // a name of another direction does not turn the line
    bdi.textContent = name ? name(from) : "";
    return [`${word} ${from}` + (name ? ", " : ""), bdi];
  };
  $("cell").replaceChildren(...range(rowBin, rowBins, rows, "row", data.tokens && queryName), " → ",
                            ...range(keyBin, keyBins, keys, "key", named && keyName), ": ",
                            share === null ? "not allowed" : percent(share));
}
$("frame").addEventListener("pointermove", event => {
  showRow(rowAt(event));
  readCell(event);
});
$("frame").addEventListener("pointerdown", readCell);
$("frame").addEventListener("pointerleave", () => showRow(state.pinned));
$("frame").addEventListener("click", event => pin(rowAt(event)));
$("frame").addEventListener("keydown", event => {
  const page = Math.max(1, Math.round(rows / 12));
  const step = {ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1, PageDown: page, PageUp: -page}[event.key];
  const to = event.key === "Home" ? 0 : event.key === "End" ? rows - 1 : state.pinned + step;
  if (Number.isNaN(to)) return;
  event.preventDefault();
  pin(to);
});
$("number").addEventListener("input", () => {
  const row = $("number").valueAsNumber;
  if (Number.isInteger(row) && row >= 0 && row < rows) pin(row);
});
$("order").addEventListener("change", arrange);
$("cut").addEventListener("change", drawMap);
dark.addEventListener("change", drawAll);
new ResizeObserver(layOut).observe($("frame"));
