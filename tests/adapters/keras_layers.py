"""Run by tests/adapters/test_keras.py with a backend: both layers against Keras's own with the same weights."""

import keras
import numpy as np

from attnc.integrations.keras import GroupedQueryAttention, MultiHeadAttention


def pairs():
    options = {"head_dim": 8, "num_query_heads": 4, "num_key_value_heads": 2}
    yield MultiHeadAttention(num_heads=3, key_dim=8, value_dim=5), keras.layers.MultiHeadAttention(3, 8, 5)
    yield GroupedQueryAttention(**options), keras.layers.GroupQueryAttention(**options)
    yield (GroupedQueryAttention(**options, sliding_window=3),
           keras.layers.GroupQueryAttention(**options, sliding_window=3))


def numpy(x):
    return keras.ops.convert_to_numpy(x)


def main():
    random = np.random.default_rng(0)
    query, value = (random.standard_normal((2, n, 12)).astype("float32") for n in (7, 7))
    mask = random.random((2, 7, 7)) < 0.7
    mask[:, :, 0] = True
    for ours, theirs in pairs():
        ours(query, value)
        theirs(query, value, return_attention_scores=True)      # without, on jax, it wants values as deep as keys
        theirs.set_weights(ours.get_weights())
        for options in ({}, {"use_causal_mask": True}, {"attention_mask": mask},
                        {"attention_mask": mask, "use_causal_mask": True}, {"value_mask": mask[:, 0]},
                        *({"attention_mask": fewer} for fewer in (mask[0], mask[:1], mask[:, :1], mask[:, None])),
                        {"attention_mask": mask[1], "use_causal_mask": True, "value_mask": mask[:, 0]}):
            wanted, scores = theirs(query, value, return_attention_scores=True, **options)
            got, weights = ours(query, value, return_attention_scores=True, **options)
            np.testing.assert_allclose(numpy(got), numpy(wanted), atol=5e-6)
            np.testing.assert_allclose(numpy(weights), numpy(scores), atol=2e-6)
            np.testing.assert_allclose(numpy(ours(query, value, **options)), numpy(wanted), atol=5e-6)
    copy = MultiHeadAttention.from_config(MultiHeadAttention(num_heads=3, key_dim=8).get_config())
    assert isinstance(copy, MultiHeadAttention)
    layer = MultiHeadAttention(num_heads=2, key_dim=4, dropout=0.5)
    layer(query, value)
    try:
        layer(query, value, training=True)
    except NotImplementedError as error:
        assert "dropout" in str(error)
    else:
        raise AssertionError("dropout was ignored")
    if keras.backend.backend() in ("torch", "jax"):
        train(query, value)
    print("all right")


def train(query, value):
    """One step of training gives the same weights as Keras's own layer."""
    trained = []
    for layer in (MultiHeadAttention, keras.layers.MultiHeadAttention):
        keras.utils.set_random_seed(1)
        given = keras.Input((7, 12))
        model = keras.Model(given, layer(num_heads=2, key_dim=6)(given, given))
        model.compile(keras.optimizers.SGD(0.5), "mse")
        model.fit(query, value, epochs=2, verbose=0, shuffle=False)
        trained.append(model.get_weights())
    for ours, theirs in zip(*trained, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


if __name__ == "__main__":
    main()
