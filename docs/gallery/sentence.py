"""
What does a word look at?
=========================

One row of attention, from the scores to the output, on a real sentence: *Ayşe kitabı okudu çünkü onu merak ediyordu*,
"Ayşe read the book because she was curious about it". Where does *onu*, "it", look?

:Shows: the chain of one query: scores, weights, weighted values and their sum
:Data: queries, keys and values of layer 0 of multilingual-e5-small, in the package (`attnc.datasets`)
:Time: 3 s
:Memory: 60 MB
:Needs: attnc[plot]
"""

# %%
# The layer has 12 heads of 11 tokens; each token has a query, a key and a value of 32 numbers.
import attnc
import attnc.datasets
import attnc.plot

data = attnc.datasets.load("turkish")
print(data.tokens)
print(data.query.shape)

# %%
# The weights of a row are shares: more than a third of what *onu* takes in comes from *kitabı*, the book.
onu, book = data.tokens.index("▁onu"), data.tokens.index("▁kitabı")
weights = attnc.attention_weights(data.query[data.head], data.key[data.head])
for token, weight in zip(data.tokens, weights[onu], strict=True):
    print(f"{token:9} {weight:.3f}")
assert weights[onu].argmax() == book and weights[onu, book] > 1 / 3

# %%
# All links of the chain in one figure. Read it from left to right: 1 and 2 differ by a factor; 3 adds up to 1; the
# rows of 5 are those of 4 times the weights of 3, and their sum is the output.
figure = attnc.plot.explain(data.query, data.key, data.value, row=onu, tokens=data.tokens, head=data.head)
figure.set_label("Six numbered panels for the query onu: score, scaled score and weight as bars, the values and the "
                 "weighted values as rows of colours, and the output, their sum.")
