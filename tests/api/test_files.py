"""Files are written whole or not at all, through links, with the modes they had or those of the umask."""

import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import attnc
from attnc._files import whole, write_text

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="modes and links are those of POSIX")


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def umask():
    """A umask that no default is."""
    before = os.umask(0o026)
    yield 0o026
    os.umask(before)


def test_a_new_file_has_the_mode_of_the_umask_and_one_that_exists_keeps_its_own(tmp_path, umask):
    new, old = tmp_path / "new.html", tmp_path / "old.html"
    old.write_text("before")
    for given in (0o600, 0o644, 0o755):
        old.chmod(given)
        for path in (new, old):
            write_text(path, "kitabı")
        assert mode(new) == 0o666 & ~umask and mode(old) == given
        assert new.read_text(encoding="utf-8") == old.read_text(encoding="utf-8") == "kitabı"


def test_a_link_is_written_through(tmp_path):
    (tmp_path / "there").mkdir()
    for target in (tmp_path / "there" / "old", tmp_path / "there" / "new"):
        link = tmp_path / f"link-{target.name}"
        link.symlink_to(target)
    (tmp_path / "there" / "old").write_text("before")
    chain = tmp_path / "chain"
    chain.symlink_to("link-old")
    for link, target in ((chain, "old"), (tmp_path / "link-new", "new")):
        write_text(link, "after")
        assert link.is_symlink() and (tmp_path / "there" / target).read_text() == "after"
    assert (tmp_path / "link-old").is_symlink()
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(OSError, match="loop"):
        write_text(loop, "x")
    assert loop.is_symlink()


def test_links_that_someone_planted_are_not_followed(tmp_path):
    victim, page = tmp_path / "victim", tmp_path / "page.html"
    victim.write_text("precious")
    for name in (f"page.html.{os.getpid()}.part", "page.html.part", ".page.html.part"):
        (tmp_path / name).symlink_to(victim)
    attnc.explorer(np.eye(2), path=page)
    assert victim.read_text() == "precious" and not page.is_symlink()


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()])
def test_a_failure_leaves_nothing_behind_and_the_old_file_as_it_was(tmp_path, error):
    path = tmp_path / "page.html"
    path.write_text("before")
    with pytest.raises(type(error)), whole(path) as part:
        part.write_text("half")
        raise error
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["page.html"]


def test_errors_name_the_path_that_was_given(tmp_path):
    for path, kind in ((tmp_path / "nowhere" / "page.html", FileNotFoundError), (tmp_path, IsADirectoryError)):
        with pytest.raises(kind) as caught:
            write_text(path, "x")
        assert caught.value.filename == str(path)
    assert os.listdir(tmp_path) == []


def test_eight_threads_save_to_one_place_at_the_same_time(tmp_path):
    path = tmp_path / "page.html"
    pages = [attnc.explorer(np.eye(n)) for n in range(1, 9)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda turn: pages[turn % 8].save(path), range(320)))
    assert path.read_text(encoding="utf-8") in [page.html for page in pages]
    assert os.listdir(tmp_path) == ["page.html"]


def test_what_is_no_regular_file_is_written_directly(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(pipe.read_text)
        write_text(pipe, "through")
        assert read.result(10) == "through"
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    write_text("/dev/null", "nowhere")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.skipif(not os.path.exists("/dev/stdout"), reason="a name for the output is not everywhere")
@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1"])
def test_the_output_of_a_process_is_written_to_by_its_name(name, tmp_path, python):
    code = f"""from attnc._files import write_text
write_text({name!r}, "by name\\n")"""
    assert python(code) == "by name"
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True)
        assert os.path.samestat(os.stat(tmp_path / "out"), os.fstat(out.fileno()))      # not another file of its name
    assert (tmp_path / "out").read_text() == "by name\n"


def test_names_as_long_as_they_may_be(tmp_path):
    path = tmp_path / ("n" * 255)
    write_text(path, "x")
    assert path.read_text() == "x"
