"""Weights under a mask over blocks: parts and statements, to the bit those under the same mask written out."""

import numpy as np
import pytest
from checking import assert_same_bits, inputs

import attnc

Q_LEN, KV_LEN = 50, 130
STATEMENTS = {
    "dense": lambda W: W.dense(), "rows": lambda W: W[0, 1, 13:37], "keys": lambda W: W[..., 40:90],
    "places": lambda W: W[1, :, 5:20, 33:99], "head": lambda W: W.head(1, 2)[7:31, 50:],
    "entropy": lambda W: W.entropy(), "argmax": lambda W: W.argmax(), "key_mass": lambda W: W.key_mass(),
    "rows of key_mass": lambda W: W.key_mass(rows=[3, 47, 20]), "key_hits": lambda W: W.key_hits(0.01),
    "map": lambda W: W.map((7, 9)), "product": lambda W: W @ np.ones(KV_LEN, np.float32),
    "transposed": lambda W: W.T @ np.ones(Q_LEN, np.float32),
    "lost_mass": lambda W: W.lost_mass(np.arange(KV_LEN) < 70),
    "sparse": lambda W: W.sparse(threshold=0.02).data,
}


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("rows, keys", [(16, 32), (7, 50), (1, 1), (60, 9)])
def test_statements(isa, heads, rows, keys, seed):
    random = np.random.default_rng(seed)
    query, key, _ = inputs(random, (2,), 4, 2, Q_LEN, KV_LEN, 16)
    cells = random.random((heads, -(-Q_LEN // rows), -(-KV_LEN // keys))) < 0.5
    whole = np.repeat(np.repeat(cells, rows, -2)[:, :Q_LEN], keys, -1)[..., :KV_LEN]
    got = attnc.AttentionWeights(query, key, block_mask=(cells, rows, keys), causal=True)
    wanted = attnc.AttentionWeights(query, key, mask=whole, causal=True)
    for name, ask in STATEMENTS.items():
        assert_same_bits(ask(got), ask(wanted), name)
