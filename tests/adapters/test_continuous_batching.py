"""transformers' continuous batching with attnc: the tokens that its own attentions give, pages read in place."""

import numpy as np
import pytest

import attnc

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore:The `paged.` prefix is no longer needed")]
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import model_of  # noqa: E402
from transformers import ContinuousBatchingConfig, GenerationConfig  # noqa: E402

from attnc.integrations import transformers as ours  # noqa: E402
from attnc.integrations.transformers import _continuous, _packed  # noqa: E402

PROMPTS = [np.random.default_rng(i).integers(4, 99, n).tolist() for i, n in enumerate((5, 17, 1, 40, 9))]
PROMPTS.append([*PROMPTS[3][:24], 7, 8])       # which shares pages with another


@pytest.fixture(scope="module", autouse=True)
def registered():
    ours.register()


@pytest.fixture
def steps(monkeypatch):
    """How many calls read keys by a block table, and how many packed ones."""
    counts = {"decode": 0, "attend": 0}
    for module, name in (_continuous, "decode"), (_packed, "attend"):
        monkeypatch.setattr(module, name, counted(counts, name, getattr(module, name)))
    return counts


def counted(counts, name, function):
    def call(*args):
        counts[name] += 1
        return function(*args)
    return call


def generate(name, attention, dtype=torch.float32, new=12, **options):
    model = model_of(name, dtype, attention)
    how = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=False)
    batching = ContinuousBatchingConfig(page_size=8, num_blocks=64, max_batch_tokens=32, **options)
    found = model.generate_batch(PROMPTS, generation_config=how, continuous_batching_config=batching,
                                 progress_bar=False)
    return [found[key].generated_tokens for key in sorted(found, key=lambda key: int(key.rpartition("_")[2]))]


@pytest.mark.parametrize("attention", ["attnc", "paged|attnc"])
@pytest.mark.parametrize("name, tables", [("Llama", True), ("Mistral", False), ("Gemma2", False), ("GptOss", False)])
def test_the_tokens_of_eager(name, tables, attention, steps):
    """By block table where all layers see all tokens; windows, softcap and sinks in packed calls."""
    wanted = generate(name, "paged|eager")
    assert not any(steps.values())
    assert generate(name, attention) == wanted
    assert len(wanted) == 6 and len({tuple(x) for x in wanted}) > 1
    assert steps["attend"] and (steps["decode"] > 0) == tables


@pytest.mark.parametrize("options", [{"max_blocks_per_request": 0}, {"max_blocks_per_request": 7},
                                     {"allow_block_sharing": False}],
                         ids=["no tables", "tables of seven pages", "no sharing"])
def test_configurations(options, steps):
    assert generate("Llama", "attnc", **options) == generate("Llama", "sdpa")
    assert (steps["decode"] > 0) == (options.get("max_blocks_per_request") != 0)


def test_bfloat16(steps):
    """Of tokens that round alike the first is chosen: the first few are those of eager."""
    got, wanted = generate("Llama", "attnc", torch.bfloat16, 3), generate("Llama", "paged|eager", torch.bfloat16, 3)
    assert sum(a == b for a, b in zip(got, wanted, strict=True)) >= 5 and steps["decode"]


def test_other_attentions_keep_their_rules():
    with pytest.raises(ValueError, match="exact is not supported for continuous batching"):
        generate("Llama", "exact")
    ours.register()
    assert not hasattr(_continuous.ContinuousBatchingManager.switch_to_cb_friendly_attn.__wrapped__, "__wrapped__")


def test_one_step_by_a_block_table():
    """The function as transformers calls it: new tokens are written, a sequence without tokens is padding."""
    random = np.random.default_rng(0)
    k_cache, v_cache = (torch.from_numpy(random.standard_normal((6, 4, 2, 8), np.float32)) for _ in range(2))
    query, key, value = (torch.from_numpy(random.standard_normal((1, n, 4, 8), np.float32)) for n in (4, 2, 2))
    table = torch.tensor([[3, 1, -1], [5, -1, -1], [2, 4, 0], [-9, 99, 7]], dtype=torch.int32)
    lengths, sinks = [6, 1, 12, 0], torch.linspace(-1, 1, 4)
    cu = torch.tensor([0, *np.cumsum(lengths)])
    before = k_cache.clone(), v_cache.clone()
    output, weights = ours.attend(torch.nn.Module(), query, key, value, None, is_causal=True, scaling=0.3, s_aux=sinks,
                                  cu_seq_lens_q=torch.arange(5), cu_seq_lens_k=cu, block_table=table, k_cache=k_cache,
                                  v_cache=v_cache, max_length_q=1, max_length_k=1, read_index=[], write_index=[])
    assert weights is None and output.shape == (1, 4, 4, 8)
    for i, n in enumerate(lengths):
        pages = [x[table[i, :-(-n // 4)].long()].reshape(-1, 2, 8)[:n].numpy() for x in (k_cache, v_cache)]
        wanted = attnc.attention(query[0, :, i:i + 1].numpy(), *(x.swapaxes(0, 1) for x in pages), scale=0.3,
                                 sinks=sinks.numpy())
        assert output[0, i].numpy().tobytes() == wanted[:, 0].tobytes()
        if n:
            page, place = table[i, (n - 1) // 4], (n - 1) % 4
            for cache, old, new in zip((k_cache, v_cache), before, (key, value), strict=True):
                assert torch.equal(cache[page, place], new[0, :, i])
                old[page, place] = new[0, :, i]
    assert torch.equal(k_cache, before[0]) and torch.equal(v_cache, before[1])
    with pytest.raises(ValueError, match="no weights in steps of continuous batching"):
        ours.attend(torch.nn.Module(), query, key, value, None, cu_seq_lens_k=cu, block_table=table, k_cache=k_cache,
                    v_cache=v_cache, output_attentions=True)
