"""The common ends of a capture script: find and verify the model file, choose the layer, write or compare the data."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
from pathlib import Path

import numpy as np
from encoder import Layer, strongest

DATA = Path(__file__).resolve().parents[2] / "attnc" / "datasets" / "data"


def arguments(purpose: str, *, package: str, file: str, sha256: str) -> argparse.Namespace:
    """Read the command line; `model` is the verified model file, by default `file` inside the installed `package`."""
    parser = argparse.ArgumentParser(description=purpose)
    parser.add_argument("--model", type=Path, metavar="FILE", help=f"the model file (default: {file} of {package})")
    parser.add_argument("--check", action="store_true", help="write nothing; compare with what is shipped")
    args = parser.parse_args()
    if args.model is None:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            parser.error(f"{package} is not installed; see README.md beside this script")
        args.model = Path(spec.origin).parent / file
    if not args.model.is_file():
        parser.error(f"there is no file {args.model}")
    found = hashlib.sha256(args.model.read_bytes()).hexdigest()
    if found != sha256:
        parser.error(f"{args.model.name} is not the file the data was made from: SHA-256 {found}, wanted {sha256}")
    return args


def ship(name: str, layers: list[Layer], tokens: list[str], *, sentence: str, query_word: str, key_word: str,
         source: str, check: bool) -> None:
    """Write the layer whose head puts most weight of `query_word` on `key_word`, or compare it with what is shipped.

    Each word must be a single token; `source` is completed with the layer, the head and how they were chosen.
    """
    rows, columns = [tokens.index(query_word)], [tokens.index(key_word)]
    layer, head, weight = strongest(layers, rows, columns)
    facts = {
        "sentence": sentence, "layer": layer, "head": head, "rows": rows, "columns": columns,
        "weight": round(weight, 6),
        "source": f"{source} Sentence: “{sentence}” with the special tokens of the model and no prefix. Layer {layer} "
                  f"(counted from 0), all heads. Of all {len(layers)} x {len(layers[layer].query)} heads, head {head} "
                  f"of this layer puts the largest weight of “{query_word.lstrip('▁')}” on “{key_word.lstrip('▁')}”: "
                  f"{weight:.4f}; each of the two is a single token. Computed in float64, stored as float32.",
    }
    arrays = {part: getattr(layers[layer], part).astype(np.float32) for part in ("query", "key", "value")}
    arrays |= {"tokens": np.array(tokens), "facts": np.array(json.dumps(facts, ensure_ascii=False))}
    path = DATA / f"{name}.npz"
    if not check:
        np.savez(path, **arrays)
        print(f"{path.name}: {path.stat().st_size} bytes\n{facts['source']}")
        return
    with np.load(path, allow_pickle=False) as shipped:
        wrong = [part for part, array in arrays.items() if part not in shipped or not _same(array, shipped[part])]
        wrong += [part for part in shipped.files if part not in arrays]
    if wrong:
        raise SystemExit(f"{path.name} differs in {', '.join(wrong)}")
    print(f"{path.name}: identical")


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays agree in dtype, shape and every byte."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
