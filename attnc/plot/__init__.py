"""Pictures of attention weights with matplotlib, the extra ``plot``.

Functions that draw one thing take ``ax=`` and return the Axes; those that fill a figure take ``figure=`` and return
the Figure. Without it they make a new one with ``matplotlib.pyplot.subplots``. Nothing is shown, no setting is changed,
and a long map is pooled before it is drawn: from lazy weights the matrix is never built.
"""

from ._chain import explain
from ._maps import heads, heatmap
from ._rows import key_mass, row

__all__ = ["explain", "heads", "heatmap", "key_mass", "row"]
