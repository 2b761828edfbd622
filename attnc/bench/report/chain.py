"""The chain on one row of a real layer, link by link: raw score, scaled score, weight, output."""

import numpy as np

import attnc
from attnc.bench.report.tables import table
from attnc.datasets import Capture


def chain(data: Capture) -> tuple[str, float]:
    """The table of one attending word of `data` and the norm of its output row.

    Parameters
    ----------
    data : attnc.datasets.Capture
        The first token of the word that attends is shown, in the head of interest.

    Returns
    -------
    text : str
        One line a key token: raw score, scaled score, weight.
    norm : float
        Euclidean norm of the row of ``weights @ value``, as `attnc.attention` computes it.
    """
    row = data.rows[0]
    query, key, value = (array[data.head] for array in (data.query, data.key, data.value))
    query = query[row:row + 1]
    raw = attnc.attention_scores(query, key, stage="raw")[0]
    scaled = attnc.attention_scores(query, key, stage="scaled")[0]
    weights = attnc.attention_weights(query, key)[0]
    output = attnc.attention(query, key, value)[0]
    lines = [[token, f"{raw[at]:.3f}", f"{scaled[at]:.3f}", f"{weights[at]:.4f}"]
             for at, token in enumerate(data.tokens)]
    lines.append(["sum", "", "", f"{weights.sum():.4f}"])
    return table(["key token", "raw score", "scaled score", "weight"], lines), float(np.linalg.norm(output))


def describe(data: Capture) -> str:
    """The sentence, the table and the norm, ready to print."""
    text, norm = chain(data)
    word = data.tokens[data.rows[0]]
    target = " ".join(data.tokens[column] for column in data.columns)
    return (f"{data.sentence}\n"
            f"Layer {data.layer}, head {data.head}: how much \"{word}\" attends to each token "
            f"(\"{target}\" is what it stands for)\n\n{text}\n\nNorm of the output row: {norm:.4f}")
