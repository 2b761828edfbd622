"""capture(): nested, overlapping, in threads and tasks; nothing of one is undone by another."""
# ruff: noqa: E402, F401, F811    (fixtures of capturing.py)

import asyncio
import threading

import pytest

pytestmark = pytest.mark.peers
torch = pytest.importorskip("torch")
pytest.importorskip("ml_dtypes")

from capturing import (
    places,
    restored,
    two,
    x,
)

from attnc.integrations.torch import capture


def test_nested_and_of_a_part(x):
    model = two()
    with capture(model, "entropy") as outer:
        with capture(model[1], "max") as inner, capture(model, "lse") as same:
            model(x)
        model(x)
    assert places(outer) == [("0", 0, 0), ("1", 0, 1)] * 2
    assert places(inner) == [("", 0, 0)] and places(same) == places(outer)[:2]
    assert hasattr(inner[0], "max") and not hasattr(inner[0], "entropy")


def test_left_in_any_order(x):
    model = two()
    first, second = capture(model, "entropy"), capture(model, "entropy")
    one, other = first.__enter__(), second.__enter__()
    model(x)
    first.__exit__(None, None, None)
    model(x)
    second.__exit__(None, None, None)
    model(x)
    assert len(one) == 2 and len(other) == 4


def test_threads_with_captures_of_their_own(x):
    model, barrier, found = two(), threading.Barrier(4), {}
    wanted = model(x)

    def work(n):
        barrier.wait(60)
        for _ in range(20):
            with capture(model, "entropy", layers=n % 2) as records:
                for _ in range(n + 1):
                    assert torch.equal(model(x), wanted)
            found.setdefault(n, []).append(places(records))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == {n: [[(str(n % 2), 0, n % 2)] * (n + 1)] * 20 for n in range(4)}


def test_a_thread_without_a_capture_is_seen_by_that_of_another(x):
    model = two()
    with capture(model, "entropy") as records:
        thread = threading.Thread(target=model, args=(x,))
        thread.start()
        thread.join(60)
    assert places(records) == [("0", 0, 0), ("1", 0, 1)]


def test_tasks(x):
    model = two()

    async def task(n):
        with capture(model, "entropy") as records:
            for _ in range(n):
                await asyncio.sleep(0.001)
                model(x)
        return len(records)

    async def tasks():
        return await asyncio.gather(*map(task, (1, 3, 2)))

    assert asyncio.run(tasks()) == [2, 6, 4]


def test_entered_in_one_thread_and_left_in_another(x):
    model = two()
    context = capture(model, "entropy")
    records = context.__enter__()
    model(x)
    thread = threading.Thread(target=context.__exit__, args=(None, None, None))
    thread.start()
    thread.join(60)
    model(x)
    assert len(records) == 2
