"""The jax adapter against ``jax.nn.dot_product_attention``: every option, jit, vmap, grad."""

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp

from attnc.integrations.jax import dot_product_attention

pytestmark = pytest.mark.more


def inputs(seed, q_len=9, kv_len=9, q_heads=4, kv_heads=2, dim=8, batch=(2,)):
    random = np.random.default_rng(seed)
    return [jnp.asarray(random.standard_normal((*batch, *shape)), jnp.float32) for shape in
            ((q_len, q_heads, dim), (kv_len, kv_heads, dim), (kv_len, kv_heads, dim))]


def options(seed, q_len=9, kv_len=9):
    random = np.random.default_rng(seed + 1)
    mask = random.random((2, 4, q_len, kv_len)) < 0.7
    mask[..., 0] = True
    return [{}, {"is_causal": True}, {"scale": 0.3}, {"mask": jnp.asarray(mask)},
            {"bias": jnp.asarray(random.standard_normal((1, 4, q_len, kv_len)), jnp.float32)},
            {"local_window_size": 2}, {"local_window_size": (3, 1), "is_causal": True},
            {"key_value_seq_lengths": jnp.array([5, 9])}]


@pytest.mark.parametrize("choice", range(8))
@pytest.mark.parametrize("jit", [False, True])
def test_it_is_the_function_of_jax(choice, jit, seed):
    arrays, chosen = inputs(seed), options(seed)[choice]

    def ours(*a):
        return dot_product_attention(*a, return_residual=True, **chosen)

    output, lse = (jax.jit(ours) if jit else ours)(*arrays)
    theirs, residual = jax.nn.dot_product_attention(*arrays, return_residual=True, **chosen)
    np.testing.assert_allclose(output, theirs, atol=2e-6)
    np.testing.assert_allclose(lse, residual, atol=4e-6)


@pytest.mark.parametrize("choice", range(8))
def test_gradients(choice, seed):
    arrays, chosen = inputs(seed), options(seed)[choice]

    def loss(function, bias, *a):
        more = chosen if bias is None else chosen | {"bias": bias}
        output = function(*a, **more)
        return (output * jnp.cos(jnp.arange(output.size).reshape(output.shape))).sum()

    bias = chosen.get("bias")
    wanted = (1, 2, 3) if bias is None else (0, 1, 2, 3)
    found = [jax.jit(jax.grad(lambda *a, f=f: loss(f, *a), list(wanted)))(bias, *arrays) if bias is not None else
             jax.grad(lambda *a, f=f: loss(f, None, *a), (0, 1, 2))(*arrays)
             for f in (dot_product_attention, jax.nn.dot_product_attention)]
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_vmap_and_no_batch(seed):
    query, key, value = inputs(seed, batch=(3,))
    got = jax.vmap(dot_product_attention)(query, key, value)
    np.testing.assert_allclose(got, jax.nn.dot_product_attention(query, key, value), atol=2e-6)
    shared = jax.vmap(dot_product_attention, in_axes=(0, None, None))(query, key[0], value[0])
    np.testing.assert_allclose(shared[1], dot_product_attention(query[1], key[0], value[0]), atol=2e-6)
    grads = jax.vmap(jax.grad(lambda *a: dot_product_attention(*a).sum()))(query, key, value)
    assert grads.shape == query.shape


def test_bfloat16_and_bias_of_four_axes_without_a_batch(seed):
    query, key, value = (x[0].astype(jnp.bfloat16) for x in inputs(seed))
    got = dot_product_attention(query, key, value, jnp.zeros((1, 1, 1, 9), jnp.bfloat16))
    assert got.dtype == jnp.bfloat16 and got.shape == query.shape
    wide = jax.nn.dot_product_attention(*(x.astype(jnp.float32) for x in (query, key, value)))
    np.testing.assert_allclose(got.astype(jnp.float32), wide, atol=0.05)


def test_rows_without_a_key_are_zero(seed):
    query, key, value = inputs(seed)
    got = dot_product_attention(query, key, value, mask=jnp.zeros((1, 1, 9, 9), bool))
    assert not got.any()
    assert not dot_product_attention(query, key, value, query_seq_lengths=jnp.array([4, 9]))[0, 4:].any()


def test_what_is_not_supported_is_named(seed):
    with pytest.raises(ValueError, match="implementation='cudnn'"):
        dot_product_attention(*inputs(seed), implementation="cudnn")
    query, key, value = inputs(seed)
    with pytest.raises(Exception, match="mask"):
        dot_product_attention(query, key, value, mask=jnp.zeros((1, 1, 9, 9), jnp.float32)).block_until_ready()
