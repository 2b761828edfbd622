"""How far a model of transformers with attnc is from the same model with `eager`, for any class of model."""

from __future__ import annotations

import contextlib
import copy
import json
import signal
import sys
import warnings

import torch
import transformers
from tiny import classes, configurations, enlarge, inputs_of, made, variants_of

from attnc.integrations.transformers import register

LARGEST = 40e6      # weights of a model
WAYS = "made", "set"
PADDINGS = "right", "left", None


def numbers_of(output, name="") -> dict[str, torch.Tensor]:
    """Every tensor of floats in an output, by place."""
    if isinstance(output, torch.Tensor):
        return {name: output.detach().double()} if output.is_floating_point() else {}
    if isinstance(output, dict):
        output = list(output.items())
    elif isinstance(output, (list, tuple)):
        output = list(enumerate(output))
    else:
        return {}
    found = {}
    for key, each in output:
        found.update(numbers_of(each, f"{name}.{key}"))
    return found


def run(model, inputs) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        return numbers_of(model(**inputs))


def distance(got: dict, wanted: dict, counts: torch.Tensor | None, padding: str | None) -> float:
    """The largest difference in units of the largest number of its tensor, padding left out.

    With padding on the left only what has a row for each token is compared: the first token, which some models take
    for the whole, sees nothing.
    """
    missing = got.keys() ^ wanted.keys()
    if any("attentions" not in name for name in missing):   # which eager gives without being asked
        return float("inf")
    errors = [0.0]
    for name in wanted.keys() - missing:
        x, y = wanted[name], got[name]
        if x.shape != y.shape:
            return float("inf")
        if counts is not None and x.shape[:2] == counts.shape:
            x, y = x[counts.bool()], y[counts.bool()]
        elif padding == "left":
            continue
        differ = (x != y) & ~(x.isnan() & y.isnan())
        if differ.any():
            error = (x - y)[differ].abs().max() / x[x.isfinite()].abs().amax().clamp(min=1e-30)
            errors.append(error.item() if error.isfinite() else float("inf"))
    return max(errors)


class Late(BaseException):
    """No `Exception`, which models catch."""


@contextlib.contextmanager
def seconds(limit: float):
    """A limit in seconds of the processor, which does not depend on what else runs."""
    def stop(*_):
        raise Late

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def eager_model(cls) -> tuple:
    """The smallest model whose eager attention gives numbers, its configuration and inputs; or None, and why not."""
    configs, reason = configurations(cls.config_class)
    reasons = [reason]
    for config in configs:
        try:
            with torch.device("meta"):
                count = sum(x.numel() for x in made(cls, config, "eager").parameters())
            if count > LARGEST:
                reasons.append(f"{count:.0e} weights")
                continue
            model = made(cls, config, "eager")
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        weights = copy.deepcopy(model.state_dict())
        for variant in variants_of(model):
            for large in (True, False):
                if large:
                    enlarge(model)
                else:
                    model.load_state_dict(weights)
                try:
                    found = run(model, inputs_of(model, "right", variant))
                except Exception as error:
                    reasons.append(f"{type(error).__name__}: {error}")
                    break
                if found and all(x.isfinite().any() for x in found.values() if x.numel()):
                    return model, config, variant
                reasons.append("no finite numbers")
    return None, " | ".join(dict.fromkeys(x.replace("\n", " ")[:150] for x in reasons if x)), None


def examine(cls, limit=6) -> dict:
    """What attnc does in this class: for each way of choosing it the distance from `eager`, or the error.

    ``{"unbuilt": reason}`` for a class of which no small model runs.
    """
    try:
        with seconds(limit):
            model, config, variant = eager_model(cls)
            if model is None:
                return {"unbuilt": config}
            inputs = {padding: inputs_of(model, padding, variant) for padding in PADDINGS}
            wanted = {padding: run(model, each) for padding, each in inputs.items()}
            found = {"noise": distance(run(model, inputs[None]), wanted[None], None, None)}
            for way in WAYS:
                try:
                    if way == "made":
                        other = made(cls, config, "attnc")
                        other.load_state_dict(model.state_dict())
                    else:
                        other = model
                        other.set_attn_implementation("attnc")
                    found[way] = max(distance(run(other, each), wanted[padding], each.get("attention_mask"), padding)
                                     for padding, each in inputs.items())
                except Exception as error:
                    found[way] = f"{type(error).__name__}: {error}"
            return found
    except Late:
        return {"unbuilt": f"more than {limit} s of the processor"}


def main(part: int, parts: int) -> None:
    """Examine each so manyth class; a line of JSON for each."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    register()
    for cls in classes()[part::parts]:
        name = f"{cls.__module__.split('.')[2]}.{cls.__name__}"
        print(json.dumps({"class": name, **examine(cls)}), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
