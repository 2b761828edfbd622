"""records.join(): the rows of all steps of a generation as one, for the sequences that came out of it."""

import copy
import pickle

import numpy as np
import pytest

pytestmark = pytest.mark.peers
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import inputs_of, model_of  # noqa: E402

from attnc.integrations.torch import capture  # noqa: E402
from attnc.integrations.transformers import register  # noqa: E402

register()

ROWS = ("entropy", "effective_keys", "max", "argmax", "mean_position", "mean_distance", "lse")


def dense(weights, call):
    return weights.dense()


def of_heads(weights, call):
    return weights.dense().mean(-3)


def largest(weights, call):
    return weights.max()


class Decoder(torch.nn.Module):
    """Attention to a cache that grows, and to fixed keys."""

    def __init__(self):
        super().__init__()
        self.inner, self.cross = (torch.nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(2))

    def forward(self, x, cache, memory):
        mask = torch.ones(x.shape[1], cache.shape[1]).triu(1 + cache.shape[1] - x.shape[1]).bool()
        return self.cross(self.inner(x, cache, cache, attn_mask=mask)[0], memory, memory, need_weights=False)[0]


@pytest.fixture
def decoder():
    torch.manual_seed(0)
    return Decoder().eval()


TOKENS, MEMORY = (torch.randn(2, n, 16, generator=torch.Generator().manual_seed(n)) for n in (7, 5))


def steps(decoder, what, counts=(4, 1, 2), **how):
    with torch.no_grad(), capture(decoder, what, **how) as records:
        end = 0
        for count in counts:
            end += count
            decoder(TOKENS[:, end - count:end], TOKENS[:, :end], MEMORY)
    return records


def whole(decoder, what, **how):
    return steps(decoder, what, (7,), **how)


def test_statistics_and_arrays(decoder):
    what = (*ROWS, "topk", "key_mass", "key_max", dense, of_heads, largest, "value")
    joined, wanted = steps(decoder, what).join(), whole(decoder, what)
    assert [(r.layer, r.call, r.index, r.shape, r.q_len) for r in joined] == [
        ("inner", 0, 0, (2, 2, 7, 7), 7), ("cross", 0, 1, (2, 2, 7, 5), 7)]
    for record, one in zip(joined, wanted, strict=True):
        for name in vars(one):
            of_positions = name == "mean_distance" and one.layer == "cross"      # which have none there
            if name not in ("layer", "topk") and not of_positions:
                np.testing.assert_allclose(getattr(record, name), getattr(one, name), rtol=0, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(record.topk.weights[..., :4], one.topk.weights[..., :4], rtol=0, atol=1e-6)
        assert record.topk.weights.shape == one.topk.weights.shape
    assert (joined[0].dense[:, :, :4, 4:] == 0).all()


def test_lazy_weights(decoder):
    joined, wanted = steps(decoder, "weights").join(), whole(decoder, "weights")
    for record, one in zip(joined, wanted, strict=True):
        np.testing.assert_allclose(record.weights.dense(), one.weights.dense(), rtol=0, atol=1e-6)
        assert record.weights.shape == record.shape == one.shape
        np.testing.assert_allclose(record.weights.key_mass(), one.weights.key_mass(), rtol=0, atol=1e-5)


def test_last_rows_and_a_few_heads(decoder):
    how = {"rows": slice(-1, None), "heads": [1]}
    for record, one in zip(steps(decoder, ("weights", dense, "max"), **how).join(), whole(decoder, dense), strict=True):
        wanted = one.dense[:, 1:, [3, 4, 6]]
        for found in (record.dense, record.weights.dense()):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)
        np.testing.assert_allclose(record.max, wanted.max(-1), rtol=0, atol=1e-6)


def test_one_step_is_itself(decoder):
    records = whole(decoder, ("map", "entropy", lambda weights, call: "anything"))
    joined = records.join()
    assert joined[0].result == "anything" and joined[0].map is records[0].map


def test_copies_join(decoder):
    records = steps(decoder, ("entropy", dense))
    for each in (copy.deepcopy(records), pickle.loads(pickle.dumps(records))):
        np.testing.assert_array_equal(each.join()[0].dense, records.join()[0].dense)


def test_what_does_not_continue(decoder):
    twice = steps(decoder, dense, (4, 1))
    twice.extend(steps(decoder, dense, (4, 1)))
    with pytest.raises(ValueError, match=r"step 2 of 'inner', 4 rows of weights \(2, 2, 4, 4\), does not continue the "
                                         r"one before, 1 rows of weights \(2, 2, 1, 5\); wanted .*records\[a:b\]"):
        twice.join()
    assert twice[4:].join()[0].shape == (2, 2, 5, 5)
    again = whole(decoder, dense)
    again.extend(whole(decoder, dense))
    with pytest.raises(ValueError, match=r"step 1 of 'inner'.*does not continue"):
        again.join()
    records = steps(decoder, dense, (4, 1))
    with torch.no_grad(), capture(decoder, dense) as other:
        decoder(TOKENS[:1, 5:6], TOKENS[:1, :6], MEMORY[:1])
    records.extend(other)
    with pytest.raises(ValueError, match=r"step 2 of 'inner', 1 rows of weights \(1, 2, 1, 6\)"):
        records.join()


def test_what_cannot_be_joined(decoder):
    for what, match in [(lambda weights, call: 3, r"result cannot be.*'int'"),
                        (lambda weights, call: weights.dense().sum(-2)[..., 0], r"result cannot be.*\(2, 2\)")]:
        with pytest.raises(ValueError, match=match):
            steps(decoder, what).join()


@pytest.mark.parametrize("what, bins", [("map", (64, 64)), ("map", (7, 7)), ("map", (4, 7)), ("map", (5, 9)),
                                        (("map", "weights"), (3, 2)), (("weights", "map"), (5, 4))], ids=str)
def test_maps(decoder, what, bins):
    """Exactly that of one pass over all tokens: from maps with a bin for each row and key, or from the weights."""
    joined, wanted = steps(decoder, what, bins=bins).join(), whole(decoder, what, bins=bins)
    for record, one in zip(joined, wanted, strict=True):
        assert record.map.shape == one.map.shape and record.map.dtype == one.map.dtype
        np.testing.assert_allclose(record.map, one.map, rtol=0, atol=1e-6)


def test_maps_of_bins_that_do_not_fit_together(decoder):
    with pytest.raises(ValueError, match=r"'inner' cannot be joined: at step 1 its \(2, 2, 1, 4\) bins are fewer than "
                                         r"the weights \(2, 2, 1, 5\); wanted \"weights\" beside"):
        steps(decoder, "map", bins=(4, 4)).join()
    none = steps(decoder, "map", rows=slice(0, 0)).join()
    assert none[0].shape == (2, 2, 0, 7) and not none[0].map.any()


def test_weights_whose_keys_are_others(decoder):
    with torch.no_grad(), capture(decoder, "weights", layers="inner") as records:
        decoder(TOKENS[:, :4], TOKENS[:, :4], MEMORY)
        decoder(TOKENS[:, 4:5], TOKENS[:, :5].flip(1), MEMORY)
    for record in records:
        record.reordered = False
    with pytest.raises(ValueError, match="'inner' cannot be joined: a step does not have the keys"):
        records.join()


# Models of transformers: the rows of `eager` at each step are what output_attentions gives of it.

def generated(name, beams, cache, what, padding=None, **how):
    dtype = torch.float32 if padding else torch.float64     # in float64 the masks of `eager` overflow
    inputs, counts = inputs_of(name, padding, dtype)
    inputs.pop("decoder_input_ids", None)
    options = {"max_new_tokens": 6, "num_beams": beams, "do_sample": False, "return_dict_in_generate": True,
               "output_scores": True, **({"cache_implementation": "static"} if cache == "static" else {})}
    eager = model_of(name, dtype, "eager").generate(**inputs, **options, output_attentions=True)
    found = []
    for kind in ("sdpa", "attnc"):
        model = model_of(name, dtype, kind)
        with capture(model, what, **how) as records:
            output = model.generate(**inputs, **options)
        assert output.sequences.tolist() == eager.sequences.tolist()
        found.append((records, output))
    return found, eager, counts


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("padding", [None, "left"])
def test_generated_tokens(padding, beams, cache):
    found, eager, counts = generated("Llama", beams, cache, ("entropy", dense), padding)
    tolerance = 4e-6 if padding else 1e-6
    for records, output in found:
        if beams > 1:
            with pytest.raises(ValueError, match="sequences exchanged their places, as in beam search"):
                records.join()
            joined = records.join(beam_indices=output.beam_indices)
        else:
            joined = records.join()
        assert len(joined) == 2 and joined[0].shape[0] == len(output.sequences)
        for layer, record in enumerate(joined):
            row, places = 0, output.beam_indices if beams > 1 else torch.arange(2)[:, None].expand(2, 6)
            for step in range(places.shape[1]):
                wanted = eager.attentions[step][layer].numpy()[places[:, step]]
                rows, keys = wanted.shape[-2:]
                got = record.dense[:, :, row:row + rows]
                kept = counts.numpy()[:, None, :, None] if step == 0 and padding else True
                np.testing.assert_allclose(got[..., :keys] * kept, wanted * kept, rtol=0, atol=tolerance)
                assert (got[..., keys:] == 0).all()
                row += rows
            assert row == record.dense.shape[-2] == record.entropy.shape[-1]


def test_a_cache_that_drops_keys():
    """A window of 4 tokens: rows of weights have no common keys."""
    found, _, _ = generated("Mistral", 1, "dynamic", "entropy")
    for records, _ in found:
        with pytest.raises(ValueError, match="does not continue the one before"):
            records.join()
        with pytest.raises(ValueError, match="or keys were dropped"):
            records[4:].join()


def test_cross_attention_of_generated_tokens():
    found, eager, _ = generated("Whisper", 1, "dynamic", ("weights", dense), layers="encoder_attn")
    for records, _ in found:
        for layer, record in enumerate(records.join()):
            wanted = np.concatenate([each[layer] for each in eager.cross_attentions], -2)
            for got in (record.dense, record.weights.dense()):
                np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6)


def test_beams_of_sequences_that_ended():
    """A row of -1 is past the end of its sequence."""
    found, _, _ = generated("Llama", 3, "dynamic", (dense, "entropy"))
    records, output = found[0]
    places = output.beam_indices.clone()
    whole = records.join(beam_indices=places)[0]
    places[1, -2:] = -1
    part = records.join(beam_indices=places)[0]
    assert (part.dense[1, :, -2:] == 0).all() and (part.entropy[1, :, -2:] == 0).all()
    np.testing.assert_array_equal(part.dense[0], whole.dense[0])
    np.testing.assert_array_equal(part.dense[1, :, :-2], whole.dense[1, :, :-2])


def test_beams_that_do_not_fit():
    [(records, output), _], _, _ = generated("Llama", 3, "dynamic", ("key_mass", dense))
    with pytest.raises(ValueError, match="key_mass cannot be joined over beams"):
        records.join(beam_indices=output.beam_indices)
    for record in records:
        del record.key_mass
    for wrong in (output.beam_indices[0], output.beam_indices.float(), output.beam_indices + 6,
                  output.beam_indices.repeat(1, 3)):
        with pytest.raises(ValueError, match=r"beam_indices is .*wanted integers \(sequences, steps\) below 6"):
            records.join(beam_indices=wrong)
    [(records, output), _], _, _ = generated("Llama", 3, "dynamic", of_heads)
    assert records.join(beam_indices=output.beam_indices)[0].of_heads.shape[0] == 2
    [(records, output), _], _, _ = generated("Llama", 3, "dynamic", lambda weights, call: weights.dense()[0])
    with pytest.raises(ValueError, match="axis of 6 sequences"):
        records.join(beam_indices=output.beam_indices)
