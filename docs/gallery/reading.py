"""
What does a reader look at? Attention inside an ONNX model
==========================================================

rapidocr's recogniser reads a line of text. Its ONNX graph was exported before the operator `Attention` was there:
its attention is MatMul and Softmax. `attnc.integrations.onnx.fuse` finds it, attnc computes it, and the weights
come out beside the text.

:Shows: a line of letters and digits, and for each of its characters the part of the picture that a head looks at
:Data: the recogniser PP-OCRv6 in the package rapidocr 3.10.0 (Apache-2.0); a line that is drawn here
:Time: 10 s
:Memory: 400 MB
:Needs: attnc[plot], onnx, onnxruntime; rapidocr, installed with --no-deps
"""

from importlib.util import find_spec
from pathlib import Path

import matplotlib
import numpy as np
import onnx
import onnxruntime
from matplotlib import pyplot
from onnx.reference import ReferenceEvaluator
from PIL import Image, ImageDraw, ImageFont

from attnc.integrations.onnx import OPERATORS, fuse

# %%
# A line of text is a picture 48 pixels high.
TEXT = "attention weights 2026"
font = ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf", 30)
picture = Image.new("L", (int(font.getlength(TEXT)) + 20, 48), 255)
ImageDraw.Draw(picture).text((10, 6), TEXT, font=font)
pixels = np.repeat(np.asarray(picture, np.float32)[None, None] / 127.5 - 1, 3, axis=1)

# %%
# Two layers of attention are found; with ``weights=True`` the model gives their weights too. ONNX's reference evaluator
# runs the whole of it, and attnc the attention in it; onnxruntime runs the model as it came.
model = onnx.load(Path(find_spec("rapidocr").origin).parent / "models/PP-OCRv6_rec_small.onnx")
fused = fuse(model, weights=True)
print(*(node.op_type for node in fused.graph.node if node.op_type in ("Softmax", "Attention")))
scores, first, _ = ReferenceEvaluator(fused, new_ops=OPERATORS).run(None, {"x": pixels})
theirs = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
assert np.abs(scores - theirs.run(None, {"x": pixels})[0]).max() < 1e-3

# %%
# Each column of eight pixels gives a character or none; what is said twice in a row is one.
characters = ["", *next(x.value for x in model.metadata_props if x.key == "character").split("\n"), " "]
said = scores[0].argmax(-1)
columns = np.flatnonzero((said > 0) & (said != np.roll(said, 1)))
read = "".join(characters[said[i]] for i in columns)
print(repr(read), first.shape)
assert read == TEXT

# %%
# One of the eight heads of the first layer keeps letters and digits apart: where it reads a digit it looks at digits,
# and where it reads a letter at letters.
head = first[0, 1][columns]
digit = np.array([character.isdigit() for character in read])
start = columns[digit][0]
on_digits = head[:, start:].sum(-1)
print(f"weight on the digits: {on_digits[digit].mean():.0%} for a digit, {on_digits[~digit].mean():.0%} for a letter")
assert on_digits[digit].mean() > 0.6 and on_digits[~digit].mean() < 0.1

figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 7), height_ratios=(1, 6), layout="constrained")
above.imshow(np.asarray(picture), cmap="Greys_r", aspect="auto")
above.axis("off")
image = below.imshow(head, cmap="Blues", norm=matplotlib.colors.PowerNorm(0.5, 0), aspect="auto",
                     extent=(0, 8 * len(said), len(read), 0))
below.axvline(8 * start, color="#b3541e")
below.axhline(np.flatnonzero(digit)[0], color="#b3541e")
below.set(xticks=(), xlabel="what it looks at", ylabel="while it reads", yticks=np.arange(len(read)) + 0.5)
below.set_yticklabels([x.replace(" ", "␣") for x in read])
figure.colorbar(image, ax=below, label="weight (square-root colours)")
figure.set_label("Above a line of text, letters and then four digits; below, a row for each character with its weights "
                 "over the width of the line: letters are dark under letters, digits under digits.")
