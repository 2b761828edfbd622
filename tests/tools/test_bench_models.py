"""The benchmark of whole models: it runs, it gives ratios of a round, and what is wrong gets none."""

import json

import numpy as np
import pytest
from measure import models

pytestmark = pytest.mark.peers


class Fake:
    """A worker that computes 1 plus an error and takes a given time."""

    def __init__(self, error=0.0, seconds=(1.0,)):
        self.error, self.seconds = error, list(seconds)

    def ask(self, command, *arguments):
        if command == "prepare":
            return [np.full((1, 2, 3), 1 + self.error, np.float32)], 0
        return {"seconds": self.seconds.pop(0)} if command == "sample" else None


def fakes(**changed):
    return {kind: Fake(seconds=(1.0, 1.0, 1.0)) for kind in models.KINDS} | changed


def test_ratios_are_those_of_a_round():
    found = models._measure(models.TINY[0], fakes(attnc=Fake(0, (1, 2, 4)), sdpa=Fake(0, (2, 2, 2))), 3)
    assert found["contenders"]["sdpa"]["ratio"] == {"median": 1.0, "min": 0.5, "max": 2.0}
    assert found["contenders"]["attnc"]["ratio"]["median"] == 1 and "failed" not in found
    assert "1.00 (0.50)" in models.table({"cases": [found]})


@pytest.mark.parametrize("kind", ["attnc", "sdpa"])
def test_what_is_wrong_is_not_timed(kind):
    found = models._measure(models.TINY[0], fakes(**{kind: Fake(1e-4)}), 3)
    assert kind in found["failed"] and "ratio" not in found["contenders"][kind]


def test_a_tiny_model(tmp_path, capsys):
    pytest.importorskip("transformers")
    file = tmp_path / "result.json"
    assert models.main(["--tiny", "--rounds", "1", "--threads", "1", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["passed"] and result["versions"]["transformers"]
    assert result["cases"][0]["contenders"].keys() == {"attnc", "sdpa", "eager"}
    assert "tiny causal" in capsys.readouterr().out


def test_padded_batches_reach_from_the_shortest_to_all():
    (ids, lengths), _ = models.CASES[1].make(0)
    assert ids.shape == (32, 128) and lengths[0] == 16 and lengths[-1] == 128
