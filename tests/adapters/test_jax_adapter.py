"""The jax adapter against ``jax.nn.dot_product_attention``: every option, jit, vmap, grad."""

from functools import partial

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


MAPPED = [      # shapes of mask, bias, query's lengths, keys' lengths; then which are mapped, by the axis they get
    ({"mask": (7,)}, {"query": 0, "mask": 0}),
    ({"mask": (6, 7)}, {"query": 0, "key": 0, "value": 0, "mask": 0}),
    ({"mask": (4, 1, 7)}, {"mask": 1}),
    ({"mask": (1, 1, 6, 7)}, {"key": 2, "mask": -1}),
    ({"mask": (2, 1, 1, 7)}, {"value": -2, "mask": 3}),
    ({"mask": (2, 4, 6, 7)}, {"query": 1}),
    ({"bias": ()}, {"bias": 0}),
    ({"bias": (7,)}, {"query": 0, "bias": 1}),
    ({"bias": (6, 1)}, {"bias": -1}),
    ({"bias": (4, 6, 7)}, {"query": -1, "key": 1, "value": 0, "bias": 2}),
    ({"bias": (2, 1, 6, 7), "mask": (6, 7)}, {"mask": 0, "bias": 0}),
    ({"kv_lengths": (2,)}, {"kv_lengths": 0}),
    ({"kv_lengths": (2,), "mask": (1, 7)}, {"query": 0, "kv_lengths": 1}),
    ({"q_lengths": (2,), "kv_lengths": (2,)}, {"q_lengths": -1, "key": 0}),
    ({"q_lengths": (2,), "bias": (1, 4, 1, 1)}, {"value": 1}),
]
CALLED = {"q_lengths": "query_seq_lengths", "kv_lengths": "key_value_seq_lengths"}
SHAPES = {"query": (2, 6, 4, 8), "key": (2, 7, 2, 8), "value": (2, 7, 2, 8)}


def drawn(seed, more, *mapped, without_batch=False):
    """Arrays of the shapes with an axis of 3, 2, ... put in where each of `mapped` says."""
    random = np.random.default_rng(seed)
    shapes = {name: shape[without_batch:] for name, shape in SHAPES.items()} | more
    found = {}
    for name, shape in shapes.items():
        for length, axes in zip((3, 2), mapped, strict=False):
            if axes.get(name) is not None:
                place = axes[name] % (len(shape) + 1)
                shape = (*shape[:place], length, *shape[place:])
        if name == "mask":
            x = np.array(random.random(shape) < 0.6)
            x[(..., 0) if shape else ()] = True
        elif name in CALLED:
            x = random.integers(1, 7, shape, np.int32)
        else:
            x = random.standard_normal(shape).astype(np.float32)
        found[name] = jnp.asarray(x)
    return found


def both(make, *arrays, atol):
    """The same of ours and of jax's; which must say something."""
    ours, theirs = (jax.tree.map(np.asarray, make(lambda a, f=f: f(**{CALLED.get(n, n): x for n, x in a.items()}))(
        *arrays)) for f in (dot_product_attention, jax.nn.dot_product_attention))
    assert max(np.abs(wanted).max() for wanted in jax.tree.leaves(theirs)) > 0.01
    for got, wanted in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        assert got.shape == wanted.shape
        np.testing.assert_allclose(got, wanted, atol=atol)


def gradients(of):
    """A function of all arrays that gives the gradients of the floats, of a sum that has no symmetry."""
    def loss(floats, others):
        output = of(floats | others)
        return (output * jnp.cos(jnp.arange(output.size).reshape(output.shape))).sum()

    def found(arrays):
        floats = {name: x for name, x in arrays.items() if x.dtype == jnp.float32}
        return jax.grad(loss)(floats, {name: x for name, x in arrays.items() if name not in floats})
    return found


def in_axes(arrays, mapped):
    return ({name: mapped.get(name) for name in arrays},)


@pytest.mark.parametrize(("more", "mapped"), MAPPED, ids=str)
@pytest.mark.parametrize("without_batch", [False, True])
def test_vmap_of_any_axes(more, mapped, without_batch, seed):
    if without_batch:       # mask and bias keep their four axes, and lengths are (1,)
        more = {name: (1, *shape[1:]) if name in CALLED or len(shape) == 4 else shape for name, shape in more.items()}
        mapped = {name: max(axis - 1, 0) if name in SHAPES and axis > 0 else axis for name, axis in mapped.items()}
    arrays = drawn(seed, more, mapped, without_batch=without_batch)
    axes = in_axes(arrays, mapped)
    both(lambda f: jax.vmap(f, axes), arrays, atol=2e-6)
    both(lambda f: jax.jit(jax.vmap(jax.jit(f), axes, out_axes=-1)), arrays, atol=2e-6)
    both(lambda f: jax.jit(jax.vmap(gradients(jax.jit(f)), axes)), arrays, atol=1e-5)
    both(lambda f: jax.jit(gradients(jax.vmap(f, axes, out_axes=1))), arrays, atol=2e-5)


@pytest.mark.parametrize(("inner", "outer"), [
    ({"query": 0}, {"key": 0}), ({"mask": 0}, {"mask": 0}), ({"mask": 1}, {"bias": 0, "kv_lengths": 0}),
    ({"kv_lengths": 0}, {"kv_lengths": 1, "query": 2}), ({"query": 0, "bias": -1}, {"value": 1, "bias": 0})], ids=str)
def test_vmap_in_vmap(inner, outer, seed):
    arrays = drawn(seed, {"mask": (6, 7), "bias": (4, 1, 7), "kv_lengths": (2,)}, inner, outer)

    def twice(f):
        return jax.vmap(jax.vmap(f, in_axes(arrays, inner)), in_axes(arrays, outer))

    both(lambda f: jax.jit(twice(f)), arrays, atol=2e-6)
    both(lambda f: jax.jit(twice(gradients(f))), arrays, atol=1e-5)
    both(lambda f: jax.jit(gradients(twice(f))), arrays, atol=5e-5)
    both(lambda f: jax.jit(jax.vmap(gradients(jax.vmap(f, in_axes(arrays, inner))), in_axes(arrays, outer))), arrays,
         atol=2e-5)


def test_the_mask_of_an_example_under_vmap():
    """Masks of (2, 1, 2) for queries of (2, 1, 2, 4): the axis of vmap is not one of theirs."""
    query, key = jnp.zeros((2, 2, 1, 2, 4)), jnp.zeros((2, 2, 2, 2, 4))
    value = jnp.arange(2.).reshape(1, 1, 2, 1, 1) * jnp.ones((2, 2, 2, 2, 4))
    mask = jnp.zeros((2, 2, 1, 2), bool).at[0, ..., 0].set(True).at[1, ..., 1].set(True)
    got = jax.vmap(lambda a, b, c, m: dot_product_attention(a, b, c, mask=m))(query, key, value, mask)
    assert got[:, :, 0, 0, 0].tolist() == [[0, 0], [1, 1]]


def test_every_rank_and_broadcast_of_mask_and_bias(seed):
    shapes = [shape[rank:] for rank in range(5) for bits in np.ndindex(2, 2, 2, 2)
              for shape in [tuple(n if bit else 1 for n, bit in zip((2, 4, 6, 7), bits, strict=True))]
              if not any(bits[:rank])]
    for shape in sorted(set(shapes)):
        for name in ("mask", "bias"):
            arrays = drawn(seed, {name: shape})
            both(jax.jit, arrays, atol=2e-6)
            if name == "bias":
                both(lambda f: jax.jit(gradients(f)), arrays, atol=1e-5)
            if len(shape) < 4 or shape[0] == 1:
                both(jax.jit, drawn(seed, {name: shape}, without_batch=True), atol=2e-6)


@pytest.mark.parametrize("ranks", [(4, 3, 4), (3, 4, 3), (3, 3, 4), (2, 3, 3), (4, 2, 2), (3, 2, 2), (2, 2, 2)])
def test_missing_axes_of_query_key_and_value_count_as_1(ranks, seed):
    sizes = [(1, 6, 4, 8), (1, 1 if 2 in ranks[1:] else 7, 2, 8), (1, 1 if 2 in ranks[1:] else 7, 2, 8)]
    sizes[0] = (1, 1, 4, 8) if ranks[0] == 2 else sizes[0]
    arrays = dict(zip(("query", "key", "value"), (
        jnp.asarray(np.random.default_rng(seed + n).standard_normal(size[4 - rank:]), jnp.float32)
        for n, (size, rank) in enumerate(zip(sizes, ranks, strict=True))), strict=True))
    both(lambda f: lambda a: f(a | {"return_residual": True}), arrays, atol=4e-6)
    both(lambda f: jax.jit(gradients(f)), arrays, atol=1e-5)
    both(lambda f: jax.jit(jax.vmap(f)), {name: jnp.stack([x, x * 2]) for name, x in arrays.items()}, atol=4e-6)


def test_the_residual_and_its_gradient_under_vmap(seed):
    """Where jax stops the gradient: the scores by hand."""
    arrays = drawn(seed, {"mask": (6, 7)}, {"query": 0, "mask": 1})
    del arrays["value"]

    def by_hand(query, key, mask):
        scores = jnp.einsum("btkgd,bskd->btkgs", query.reshape(2, 6, 2, 2, 8), key) / 8**0.5
        return jax.nn.logsumexp(jnp.where(mask[:, None, None], scores, -jnp.inf), -1).reshape(2, 6, 4)

    def ours(query, key, mask):
        return dot_product_attention(query, key, key, mask=mask, return_residual=True)[1]

    def loss(lse):
        return lambda floats, mask: (jnp.cos(jnp.arange(48.)).reshape(2, 6, 4) * lse(**floats, mask=mask)).sum()

    mask = arrays.pop("mask")
    for make in (loss, lambda lse: jax.grad(loss(lse))):
        got, wanted = (jax.vmap(make(lse), ({"query": 0, "key": None}, 1))(arrays, mask) for lse in (ours, by_hand))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, wanted)


def test_lengths_mapped_as_scalars(seed):
    """Which jax.nn has no name for: () is the length of all."""
    query, key, value = inputs(seed, batch=())
    lengths = jnp.array([3, 9, 5])
    got = jax.vmap(lambda n: dot_product_attention(query, key, value, key_value_seq_lengths=n))(lengths)
    for n, one in zip(lengths, got, strict=True):
        wanted = jax.nn.dot_product_attention(query, key, value, key_value_seq_lengths=n[None])
        np.testing.assert_allclose(one, wanted, atol=2e-6)


def test_more_batch_axes_than_jax_has(seed):
    arrays = drawn(seed, {"mask": (6, 7), "kv_lengths": (2,)}, {"query": 0, "key": 0, "kv_lengths": 0})
    got = dot_product_attention(**{CALLED.get(name, name): x for name, x in arrays.items()})
    for n, one in enumerate(got):
        wanted = jax.nn.dot_product_attention(arrays["query"][n], arrays["key"][n], arrays["value"], None,
                                              arrays["mask"], key_value_seq_lengths=arrays["kv_lengths"][n])
        np.testing.assert_allclose(one, wanted, atol=2e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_traced_scale(dtype, seed):
    arrays = [x.astype(dtype) for x in inputs(seed)]
    scales = jnp.array([0.3, 0.0, -0.7])
    atol = 0.05 if dtype == "bfloat16" else 1e-5

    def loss(f, scale):
        output = f(*arrays, scale=scale)
        assert output.dtype == dtype
        return (output.astype(jnp.float32) * jnp.cos(jnp.arange(output.size).reshape(output.shape))).sum()

    for make in (lambda f: jax.vmap(partial(loss, f)), lambda f: jax.jit(jax.vmap(jax.grad(partial(loss, f))))):
        got, wanted = (make(f)(scales) for f in (dot_product_attention, jax.nn.dot_product_attention))
        np.testing.assert_allclose(got, wanted, rtol=atol, atol=atol)


@pytest.mark.parametrize("transform", [
    lambda f: lambda x: jax.jvp(f, (x,), (x,)), jax.jacfwd, lambda f: lambda x: jax.linearize(f, x)[1](x),
    lambda f: jax.jit(jax.jacfwd(f)), lambda f: jax.vmap(jax.jacfwd(f)), jax.hessian])
def test_forward_mode_is_refused(transform, seed):
    query, key, value = inputs(seed)
    with pytest.raises(TypeError, match="forward-mode"):
        transform(lambda x: dot_product_attention(x, key[:1], value[:1]))(query[:1])


def test_second_derivatives_are_refused(seed):
    query, key, value = inputs(seed)
    first = jax.grad(lambda x: dot_product_attention(x, key, value).sum())
    for second in (jax.grad(lambda x: first(x).sum()), jax.jit(jax.grad(lambda x: first(x).sum()))):
        with pytest.raises(NotImplementedError, match="dot_product_attention has no second derivatives"):
            second(query)


@pytest.mark.parametrize(("kind", "text", "more"), [
    (ValueError, "mask has shape", {"mask": jnp.ones((3, 1, 1, 9), bool)}),
    (ValueError, "bias has shape", {"bias": jnp.ones((2, 1, 4, 9, 9))}),
    (ValueError, "query_seq_lengths has shape", {"query_seq_lengths": jnp.array([1, 2, 3])}),
    (ValueError, "key_value_seq_lengths has shape", {"key_value_seq_lengths": jnp.array([[1, 2], [1, 2]])}),
    (TypeError, "key_value_seq_lengths must be an integer", {"key_value_seq_lengths": jnp.array([1., 2.])}),
    (TypeError, "bias must be float", {"bias": jnp.ones((9, 9), int)}),
    (TypeError, "mask must be bool", {"mask": jnp.ones((9, 9), int)}),
    (ValueError, "value has length 8", {"value": jnp.ones((2, 8, 2, 8))}),
    (TypeError, "dtypes float32, float32, int32; wanted floats", {"value": jnp.ones((2, 9, 2, 8), int)})], ids=range(9))
def test_wrong_arguments_raise_when_traced(kind, text, more, seed):
    arrays = dict(zip(("query", "key", "value"), inputs(seed), strict=True)) | more
    with pytest.raises(kind, match=text):
        jax.eval_shape(lambda: dot_product_attention(**arrays))


def test_an_int_window_of_numpy(seed):
    arrays = inputs(seed)
    got = dot_product_attention(*arrays, local_window_size=np.int64(2))
    np.testing.assert_array_equal(got, dot_product_attention(*arrays, local_window_size=2))
