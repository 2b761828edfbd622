"""Check the states of merge_states: outputs with the lse of their keys."""

import numpy as np

from .._types import Shape
from .arrays import accumulator, describe, float_array, promoted
from .scalars import LAYOUTS, check_choice


def states_args(states: object, layout: object) -> tuple[list[np.ndarray], list[np.ndarray], np.dtype]:
    """Outputs and lses of equal shapes, outputs in the order (..., length, dim), and the accumulation dtype."""
    layout = check_choice("layout", layout, LAYOUTS)
    if not isinstance(states, (list, tuple)):
        raise TypeError(f"states must be a list or tuple of pairs (output, lse), got {describe(states)}")
    if not states:
        raise ValueError("states is empty; wanted at min_ndim one pair (output, lse)")
    outputs: list[np.ndarray] = []
    lses: list[np.ndarray] = []
    for i, state in enumerate(states):
        if not isinstance(state, (list, tuple)) or len(state) != 2:
            raise TypeError(f"states[{i}] must be a pair (output, lse), got {describe(state)}")
        output, lse = float_array(f"states[{i}][0]", state[0]), float_array(f"states[{i}][1]", state[1])
        _check_shapes(i, output, lse, outputs[0].shape if outputs else output.shape, layout)
        outputs.append(output)
        lses.append(lse)
    acc = accumulator(promoted(*(x.dtype for x in (*outputs, *lses))))
    if layout == "bnhd":
        outputs = [output.swapaxes(-2, -3) for output in outputs]
    return outputs, lses, acc


def _check_shapes(i: int, output: np.ndarray, lse: np.ndarray, first: Shape, layout: str) -> None:
    min_ndim = 3 if layout == "bnhd" else 2
    if output.ndim < min_ndim:
        raise ValueError(f"states[{i}][0] has {output.ndim} axes, shape {output.shape}; wanted an output of at least "
                         f"{min_ndim} axes for layout={layout!r}")
    if output.shape != first:
        raise ValueError(f"states[{i}][0] has shape {output.shape}; wanted {first}, the shape of states[0][0]")
    rows = output.shape[:-1]
    if layout == "bnhd":
        rows = (*rows[:-2], rows[-1], rows[-2])
    if lse.shape != rows:
        raise ValueError(f"states[{i}][1] has shape {lse.shape}; wanted {rows}, one lse for each row of the output")
