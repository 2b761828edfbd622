"""``python -m attnc view``: what it shows of an .npz file, what a file may hold, and what is wrong with one."""

import inspect
import io
import sys
import zipfile

import numpy as np
import pytest

import attnc
from attnc.__main__ import main
from attnc._views import files


def test_view_reads_queries_and_keys_with_their_options(tmp_path, capsys, seed):
    query, key = np.random.default_rng(seed).standard_normal((2, 3, 12, 8))
    file = tmp_path / "a.npz"
    words = np.array([f"▁w{i}" for i in range(12)])
    np.savez(file, query=query, key=key, causal=True, scale=0.5, tokens=words, other=1)
    assert main(["view", str(file), "--head", "1", "--row", "7", "--top", "2"]) == 0
    text = capsys.readouterr().out
    weights = attnc.attention_weights(query, key, causal=True, scale=0.5)[1, 7]
    for key_at in np.argsort(-weights)[:2]:
        assert f"w{key_at} " in text and f"{weights[key_at]:.4f}" in text
    assert "not allowed" in text and "▁" not in text and "\x1b" not in text


def test_view_writes_a_page_and_reads_weights(tmp_path, capsys):
    file, page = tmp_path / "a.npz", tmp_path / "a.html"
    np.savez(file, weights=np.eye(4)[None], mask=np.tri(4, dtype=bool))
    assert main(["view", str(file), "--html", str(page), "--head", "0", "--row", "2"]) == 0
    assert str(page) in capsys.readouterr().out
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>") and '"head":0,"row":2' in text and "<h1>a</h1>" in text


def test_view_has_colours_only_on_a_terminal_that_wants_them(tmp_path, monkeypatch, capsys):
    file = tmp_path / "a.npz"
    np.savez(file, weights=np.eye(4))
    for environment, coloured in (({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)):
        with monkeypatch.context() as patch:
            patch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
            for name in ("NO_COLOR", "TERM"):
                patch.delenv(name, raising=False)
            for name, value in environment.items():
                patch.setenv(name, value)
            assert main(["view", str(file)]) == 0
        assert ("\x1b" in capsys.readouterr().out) is coloured


def test_view_writes_what_an_ascii_terminal_can(tmp_path, python):
    file = tmp_path / "a.npz"
    np.savez(file, weights=np.full((2, 2), 0.5), tokens=np.array(["kitabı", "onu"]))
    text = python(f"from attnc.__main__ import main; main(['view', {str(file)!r}])", PYTHONIOENCODING="ascii")
    assert text.isascii() and "kitab?" in text and "##" in text


def test_view_shows_no_control_character_of_a_file(tmp_path, capsys):
    """Title, clear and clipboard of a terminal; the direction of text; in tokens, names of arrays and of the file."""
    evil = "\x1b]52;c;eA==\x07\x9b2J\u202e\u200b\r"
    folder = tmp_path / "a\x1b[2J"
    folder.mkdir()
    file, other = folder / "\x9b\u202e.npz", tmp_path / "other.npz"
    np.savez(file, weights=np.full((2, 2), 0.5), tokens=np.array([evil + "a", "\ud800"]))
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr(evil, b"x" * 100)
    page = tmp_path / "\x1b[2J.html"
    said = []
    for arguments in ([str(file), "--html", str(page)], [str(other)], [str(file), "--row", "9"],
                      [str(folder / "\x9bmissing.npz")], [str(folder)]):
        main(["view", *arguments])
        said += capsys.readouterr()
    text = "".join(said)
    assert r"\x1b]52;c;" in text and "must hold weights" in text and r"\x1b[2J.html: a page of all heads" in text
    assert {sign for sign in text if not sign.isprintable()} == {"\n"}


def test_view_takes_every_option_that_a_file_can_hold(tmp_path, capsys, seed):
    """An option as an array: numbers of no axis or of one, pairs, names; -1 for an open side of a window."""
    rng = np.random.default_rng(seed)
    query, key = rng.standard_normal((2, 2, 4, 12, 8))
    ids = np.arange(12) // 5
    file = tmp_path / "a.npz"
    options = {
        "mask": rng.random((12, 12)) < 0.8, "key_mask": np.arange(24).reshape(2, 12) % 7 != 3,
        "bias": rng.standard_normal((4, 12, 12)), "relative_bias": rng.standard_normal((4, 23)),
        "relative_index": np.arange(23) // 4, "relative_key": rng.standard_normal((4, 6, 8)),
        "relative_query": rng.standard_normal((1, 6, 8)),
        "block_mask": (rng.random((4, 3, 4)) < 0.7, 5, 3), "key_indices": rng.integers(-1, 12, (1, 12, 5)),
        "k_positions": rng.permutation(12), "causal": True, "window": (3, 1), "q_offset": np.array([1, 0]),
        "scale": 0.5, "softcap": 3.0, "alibi_slopes": np.ones(4) / 4, "sinks": np.zeros(4),
        "q_segments": ids, "k_segments": ids, "q_lengths": np.array([12, 9]), "kv_lengths": np.array([10, 12]),
        "layout": "bhnd", "lse": np.full((2, 4, 12), 9.0), "num_threads": 1,
    }
    assert options.keys() | {"query", "key"} == inspect.signature(attnc.AttentionWeights).parameters.keys()
    for name, value in options.items():
        given = {name: value} | ({"k_segments": ids, "q_segments": ids} if "segments" in name else {})
        if name in ("relative_index", "relative_key", "relative_query"):
            given |= {"relative_index": options["relative_index"], "relative_key": options["relative_key"]}
        W = attnc.AttentionWeights(query, key, **given)
        if name == "block_mask":
            value, given["block_sizes"] = value[0], np.array(value[1:])
        shapes = [np.asarray(value)] + [np.atleast_1d(value)] * (np.ndim(value) == 0)
        for stored in shapes:
            np.savez(file, query=query, key=key, **given | {name: stored})
            source, _, _ = files.read(file)
            assert np.array_equal(source.weights.dense(), W.dense()), name
            assert main(["view", str(file), "--head", "1,2"]) == 0
    for stored, window in ((np.array([-1, 2]), (None, 2)), (np.array([1, -1], np.int8), (1, None))):
        np.savez(file, query=query, key=key, window=stored)
        assert np.array_equal(files.read(file)[0].weights.dense(),
                              attnc.AttentionWeights(query, key, window=window).dense())
    np.savez(file, query=query[0], key=key[0], tokens=np.array([f"w{i}".encode() for i in range(12)]))
    assert files.read(file)[1][:2] == ["w0", "w1"]


def test_view_reads_bfloat16_which_numpy_stores_without_its_name(tmp_path, seed):
    import ml_dtypes

    query, key = np.random.default_rng(seed).standard_normal((2, 9, 8)).astype(ml_dtypes.bfloat16)
    np.savez(tmp_path / "a.npz", query=query, key=key)
    np.savez(tmp_path / "b.npz", weights=attnc.attention_weights(query, key))
    source, wanted = files.read(tmp_path / "a.npz")[0], attnc.AttentionWeights(query, key)
    assert np.array_equal(source.weights.dense(), wanted.dense())
    assert not files.read(tmp_path / "b.npz")[0].no_key().any()


def header(shape, descr="<f4"):
    """The header of an .npy file that declares `shape`."""
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"shape": shape, "fortran_order": False, "descr": descr})
    return out.getvalue()


def damaged():
    """Bytes of .npz files that are none, with what the error says."""
    whole = io.BytesIO()
    np.savez(whole, weights=np.eye(40))
    whole, at = whole.getvalue(), whole.getvalue().index(b"NUMPY") + 500
    yield "checksum", whole[:at] + b"\x01" + whole[at + 1:], "array weights cannot be read: Bad CRC-32"
    packed = io.BytesIO()
    np.savez_compressed(packed, weights=np.random.default_rng(0).random((40, 40)))
    packed = bytearray(packed.getvalue())
    packed[60:90] = b"\xff" * 30
    yield "deflate", bytes(packed), "array weights cannot be read"
    yield "cut", whole[:300] + whole[800:], "a.npz"
    members = {
        "shape": (header((2**40, 2**20)) + b"x" * 64, "takes 4,611,686,018,427,387,904 bytes, and it has 64"),
        "negative": (header((-1, 4)), "array weights cannot be read"),
        "empty": (header((2**40, 0)), "it is empty, with shape"),
        "nothing": (header((2**40,), "<U0"), "it is empty"),
        "objects": (header((1, 1), "|O") + b"x" * 8, "Python objects"),
        "magic": (b"no array", "array weights cannot be read"),
        "short": (b"", "array weights cannot be read"),
        "header": (b"\x93NUMPY\x01\x00\x10\x00{'shape': __im__}", "array weights cannot be read"),
    }
    for name, (content, said) in members.items():
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("weights.npy", content)
        yield name, file.getvalue(), said


@pytest.mark.parametrize(("content", "said"), [pytest.param(*case[1:], id=case[0]) for case in damaged()])
def test_view_says_what_is_wrong_with_a_damaged_file(content, said, tmp_path, capsys):
    file = tmp_path / "a.npz"
    file.write_bytes(content)
    assert main(["view", str(file)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and "Traceback" not in error


def test_a_file_that_unpacks_to_much_more_is_refused_before_it_is(tmp_path, python):
    """1.25 GiB of zeros in 6 MB, and rows without end from broadcast axes; the process may not have them."""
    file, rows = tmp_path / "a.npz", tmp_path / "rows.npz"
    with (zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
          archive.open("weights.npy", "w") as member):
        member.write(header((5 * 2**13, 2**13)))
        for _ in range(80):
            member.write(bytes(2**24))
    many = np.zeros((30_000, 1, 1, 1, 1), np.float32)
    np.savez(rows, query=many, key=many.reshape(1, 30_000, 1, 1, 1))
    said = python(f"""
import resource
resource.setrlimit(resource.RLIMIT_AS, (3 * 2**29,) * 2)
from attnc._views import files
for path in ({str(file)!r}, {str(rows)!r}):
    try:
        files.read(path)
    except ValueError as error:
        print(error)
""")
    assert "arrays of 1,342,177,280 bytes, more than the 1,073,741,824 that are read" in said
    assert "more rows than are read from a file of its size" in said


def test_no_damage_makes_a_traceback(tmp_path, seed):
    """Random bytes of a file are others: it is read, or refused by a ValueError or a TypeError."""
    rng = np.random.default_rng(seed)
    arrays = {"query": np.eye(5), "key": np.eye(5), "window": np.array([1, 2]), "tokens": np.array(list("abcde"))}
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", **arrays)
        whole = np.frombuffer((tmp_path / "a.npz").read_bytes(), np.uint8)
        refused = 0
        for _ in range(300):
            damaged = whole.copy()
            damaged[rng.integers(0, len(whole), rng.integers(1, 6))] = rng.integers(0, 256)
            (tmp_path / "b.npz").write_bytes(damaged.tobytes())
            try:
                files.read(tmp_path / "b.npz")
            except (ValueError, TypeError):
                refused += 1
        assert refused > 100


@pytest.mark.parametrize(("arrays", "arguments", "message"), [
    ({"weights": np.eye(3)}, ["--head", "1"], "head must be an integer from 0 to 0, got 1"),
    ({"weights": np.eye(3)}, ["--row", "3"], "row must be an integer from -3 to 2, got 3"),
    ({"weights": np.ones((2, 2, 3, 3)) / 3}, ["--head", "1"], "head must be a pair"),
    ({"query": np.eye(3)}, [], "must hold weights, or query and key; it holds query"),
    ({"weights": np.eye(3), "tokens": np.array(["a"])}, [], "tokens must be as many as the queries, 3, got 1"),
    ({"query": np.eye(3), "key": np.eye(3), "scale": np.array("x")}, [], "scale must be a real number"),
    ({"query": np.eye(3), "key": np.eye(3), "window": np.array([1, 2, 3])}, [], "window"),
    ({"query": np.eye(3), "key": np.eye(3), "scale": np.array(None)}, [], "Python objects, which are not loaded"),
    ({"weights": np.eye(3), "tokens": np.array([["a"]] * 3)}, [], "tokens must have one axis, got shape (3, 1)"),
    ({f"array{i}": np.eye(2) for i in range(30)}, [], "and 18 more"),
])
def test_view_says_what_is_wrong(arrays, arguments, message, tmp_path, capsys):
    file = tmp_path / "a.npz"
    np.savez(file, **arrays)
    assert main(["view", str(file), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_view_needs_an_npz_file(tmp_path, capsys):
    for name, content in (("missing.npz", None), ("text.npz", b"no zip"), ("empty.npz", b"")):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        assert main(["view", str(tmp_path / name)]) == 2
        assert name in capsys.readouterr().err
    np.save(tmp_path / "one.npy", np.eye(2))
    assert main(["view", str(tmp_path / "one.npy")]) == 2
    with pytest.raises(SystemExit):
        main(["view", "a.npz", "--head", "one"])
