"""What is measured: cases of attention and of the other functions, and the sets of them that are run."""

from attnc.bench.cases.attention import DrawnCase, aligned, case, copies, reads, visible, wanted
from attnc.bench.cases.sets import REGIMES, SETS, BenchCase, matches, regime, select

__all__ = ["REGIMES", "SETS", "BenchCase", "DrawnCase", "aligned", "case", "copies", "matches", "reads", "regime",
           "select", "visible", "wanted"]
