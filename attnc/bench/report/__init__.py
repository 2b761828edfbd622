"""What was measured, for a reader: tables, how to read them, and the comparison of two runs."""

from attnc.bench.report.comparison import FELL_POINTS, comparable, earlier, merged, regressions
from attnc.bench.report.tables import detail_table, noise, notes, regime_table, speed_table, table

__all__ = ["FELL_POINTS", "comparable", "detail_table", "earlier", "merged", "noise", "notes", "regime_table",
           "regressions", "speed_table", "table"]
