"""What is measured: cases of attention and of the other functions, and the sets of them that are run."""

from attnc.bench.cases.attention import (
    ADDED,
    TABLES,
    DrawnCase,
    added,
    aligned,
    case,
    copies,
    drawn,
    reads,
    table_rows,
    visible,
    wanted,
)
from attnc.bench.cases.sets import REGIMES, SETS, BenchCase, matches, regime, select

__all__ = ["ADDED", "REGIMES", "SETS", "TABLES", "BenchCase", "DrawnCase", "added", "aligned", "case", "copies",
           "drawn", "matches", "reads", "regime", "select", "table_rows", "visible", "wanted"]
