"""Types of the compiled module _cpu (src/cpu.pyx)."""

from ._types import Array

BUILT: tuple[str, ...]
LEFT_OUT: tuple[str, ...]
COMPILER: str
__test__: dict[str, str]

def supports(name: str, /) -> bool: ...
def align_rows(block: Array, line: Array, window: Array, sums: Array, moves: Array, first: bool, /) -> None: ...
def align_path(moves: Array, rows: Array, columns: Array, /) -> int: ...
