"""The parity benchmark: is attnc right on this machine, and how near is it to what the machine can do?

``python -m attnc check`` and ``python -m attnc bench`` are its command lines; ``attnc.bench.runner.run`` gives the
measurements as a dictionary.
"""


class Unsupported(Exception):
    """A contender is not installed, or cannot do a case; the message says why."""

    @classmethod
    def import_of(cls, error: ImportError):
        """For a contender that cannot be imported."""
        return cls("not installed" if isinstance(error, ModuleNotFoundError) else f"cannot be imported: {error}")
