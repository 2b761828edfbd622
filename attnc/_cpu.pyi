"""Types of the compiled module _cpu (src/cpu.pyx)."""

BUILT: tuple[str, ...]
LEFT_OUT: tuple[str, ...]
COMPILER: str
__test__: dict[str, str]

def supports(name: str, /) -> bool: ...
