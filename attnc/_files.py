"""Writing a file whole or not at all."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OPEN = Path("/dev"), Path("/dev/fd")        # names of open files, which another file cannot replace


@contextmanager
def whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A place to write a file, which then replaces `path` at once; after an error nothing has changed.

    The place is in a new folder beside the target that only this user may enter, so that no one can plant a link
    there and the mode of a new file is the umask's. A target that is a link is written through, one that exists keeps
    its mode, and one that is no regular file (a pipe, a device, an open file such as /dev/stdout) is written directly.

    Yields
    ------
    pathlib.Path
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if (path.exists() and not path.is_file()) or path.parent in OPEN or path.is_relative_to("/proc"):
        yield path
        return
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    try:
        folder = tempfile.TemporaryDirectory(prefix=".attnc-", dir=target.parent)
    except OSError as error:        # the error names the temporary folder
        raise OSError(error.errno, error.strerror, str(path)) from None
    with folder:
        part = Path(folder.name, path.name)
        yield part
        if target.exists():
            shutil.copymode(target, part)
        os.replace(part, target)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` as UTF-8 to `path`, whole or not at all."""
    with whole(path) as part:
        part.write_text(text, encoding="utf-8")
