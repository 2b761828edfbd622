"""
When was each word said? Whisper's word times, with fusion left on
==================================================================

openai-whisper finds the times of words in the weights with which the decoder looks at the sound. Its `timing.py` turns
fused attention off for that. Here the model runs as it is: `attnc.integrations.torch.capture` takes the weights of its
alignment heads, and `attnc.align` finds the path.

:Shows: the spectrogram of a spoken sentence, and the weights of a trained Whisper that find when each word was said
:Data: made here: words of two gliding tones each, and a Whisper of one layer trained on 224 sentences of them
:Time: 15 s
:Memory: 600 MB
:Needs: attnc[plot], torch; openai-whisper
"""

import os

import numpy as np
import torch
from matplotlib import pyplot

import attnc
from attnc.integrations.torch import capture

os.environ["NUMBA_DISABLE_JIT"] = "1"       # timing.py would compile for longer than its loops take here
import whisper.timing

TOKENIZER = whisper.tokenizer.get_tokenizer(multilingual=False)
BEGIN = [*TOKENIZER.sot_sequence, TOKENIZER.no_timestamps]
RATE, FRAMES = 16000, 300       # samples a second, and spectra of three seconds

# %%
# What ``whisper.timing.find_alignment`` does, without its switch: the weights of the alignment heads are cut to the
# length of the sound, standardised and filtered by medians. The path through them changes words at their borders.
def tokens_by_frames(model, text, mel, frames):
    heads = {f"decoder.blocks.{layer}.cross_attn": row.nonzero()[:, 0].tolist()
             for layer, row in enumerate(model.alignment_heads.to_dense()) if row.any()}
    tokens = torch.tensor([[*BEGIN, *text, TOKENIZER.eot]])
    with torch.no_grad(), capture(model, {"seen": lambda w, _: w[0, :, :, :frames // 2]}, heads=heads) as records:
        model(mel[None], tokens)
    weights = np.concatenate([record.seen for record in records])
    weights /= weights.sum(-1, keepdims=True)
    weights = (weights - weights.mean(1, keepdims=True)) / weights.std(1, keepdims=True)
    weights = np.pad(weights, [(0, 0), (0, 0), (3, 3)], "reflect")
    return np.median(np.lib.stride_tricks.sliding_window_view(weights, 7, -1), -1).mean(0)[len(BEGIN) - 1:-1]

def word_times(rows, columns, text):     # start and end of each, in seconds
    begins = columns[np.flatnonzero(np.diff(rows, prepend=-1))] / 50
    borders = np.cumsum([0, *map(len, TOKENIZER.split_to_word_tokens([*text, TOKENIZER.eot])[1][:-1])])
    return np.stack([begins[borders[:-1]], begins[borders[1:]]], -1)

# %%
# These weights are those of `timing.py`: its own path through them gives its times to the digit. The path of
# `attnc.align` is the same or, where two paths tie and `timing.py` takes a lesser one, better.
def times_and_weights(model, text, mel, frames):
    weights = tokens_by_frames(model, text, mel, frames)
    theirs, ours = whisper.timing.dtw(torch.tensor(-weights)), attnc.align(weights, medfilt=None)
    expected = whisper.timing.find_alignment(model, TOKENIZER, text, mel, frames)
    assert word_times(*theirs, text).tolist() == [[word.start, word.end] for word in expected]
    assert weights[tuple(ours)].sum(dtype=float) > weights[tuple(theirs)].sum(dtype=float) - 1e-9
    return word_times(*ours, text), weights

torch.manual_seed(0)        # random weights in the shape of Whisper's "tiny"
tiny = whisper.model.Whisper(whisper.model.ModelDimensions(80, 1500, 384, 6, 4, 51864, 448, 384, 6, 4)).eval()
torch.nn.init.normal_(tiny.decoder.positional_embedding)
times_and_weights(tiny, TOKENIZER.encode(" unbelievably, the quick brown fox jumps"), torch.randn(80, 3000), 3000)

# %%
# A model that has learned shows whether they are right. It hears four to six of eight words, in any order.
random, WORDS = np.random.default_rng(0), " one two three four five six seven eight"
IDS, PITCHES = np.array(TOKENIZER.encode(WORDS)), random.uniform(200, 3000, (8, 2, 2))

def sentence():
    words = random.permutation(8)[:random.integers(4, 7)]
    lengths = random.uniform(0.25, 0.4, len(words))
    starts = 0.1 + np.cumsum(lengths + random.uniform(0.02, 0.05, len(words))) - lengths
    sound = random.normal(0, 0.003, 3 * RATE)
    for (here, there), start, length in zip(PITCHES[words].mT[..., None], starts, lengths, strict=True):
        s = np.linspace(0, 1, int(length * RATE))
        glide = np.cumsum(here * (1 - s) + there * s, -1) * 2 * np.pi / RATE
        sound[int(start * RATE):][:len(s)] += 0.1 * (np.sin(glide) * np.sin(np.pi * s) ** 0.5).sum(0)
    return IDS[words].tolist(), np.stack([starts, starts + lengths], -1), sound.astype(np.float32)

said = [sentence() for _ in range(256)]
mels = whisper.log_mel_spectrogram(torch.tensor(np.stack([sound for *_, sound in said])))
tokens = torch.tensor([[*BEGIN, *words] + [TOKENIZER.eot] * (7 - len(words)) for words, *_ in said])
model = whisper.model.Whisper(whisper.model.ModelDimensions(80, FRAMES // 2, 64, 4, 1, 51864, 32, 64, 1, 1))
torch.nn.init.normal_(model.decoder.positional_embedding, std=0.02)
torch.nn.init.normal_(model.decoder.token_embedding.weight, std=0.1)
full, ids = model.decoder.token_embedding, torch.unique(tokens)
model.decoder.token_embedding = torch.nn.Embedding.from_pretrained(full.weight[ids].detach())    # of few words: quick
optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], 2e-3)
for _ in range(500):
    some = torch.randint(0, 224, (8,))
    targets = torch.searchsorted(ids, tokens[some])
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(mels[some], targets[:, :-1]).mT, targets[:, 1:]).backward()
    optimizer.step()
model.decoder.token_embedding = full
found = [times_and_weights(model, words, mel, FRAMES) for (words, *_), mel in zip(said[224:], mels[224:], strict=True)]
errors = [np.abs(times - when) for (times, _), (_, when, _) in zip(found, said[224:], strict=True)]
assert np.median(np.concatenate(errors)) < 0.15
print("32 new sentences: median error of starts and ends", np.median(np.concatenate(errors), 0).round(3), "seconds")

# %%
# Of these sentences the one of middling error. Brown: when its words were said. Blue: weights. Lines: the times found.
number = np.argsort([error.mean() for error in errors])[16]
(times, weights), (words, when, _) = found[number], said[224 + number]
figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(9, 5), layout="constrained")
above.imshow(mels[224 + number].numpy(), origin="lower", aspect="auto", extent=(0, 3, 0, 80), cmap="Greys")
below.imshow(weights[:len(words)], aspect="auto", extent=(0, 3, len(words), 0), cmap="Blues", vmin=0)
for i, (word, (start, end)) in enumerate(zip(words, when, strict=True)):
    above.text((start + end) / 2, 83, TOKENIZER.decode([word]), ha="center")
    above.axvspan(start, end, color="#b3541e", alpha=0.2)
    below.fill_between((start, end), 0, len(words), color="#b3541e", alpha=0.1)
    below.plot(times[i], (i + 0.5, i + 0.5), color="black", marker="|", markersize=14)
below.set(xlabel="seconds", yticks=np.arange(len(words)) + 0.5, yticklabels=[TOKENIZER.decode([x]) for x in words])
figure.set_label("Above a spectrogram with the words that were said; below, for each word, its weights over time and a "
                 "line from its start to its end as found, which lie close to when it was said.")
