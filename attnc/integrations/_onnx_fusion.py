"""Fuses MatMul, Softmax and MatMul into the `Attention` operator, in models that were exported without it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import onnx
from onnx import helper, numpy_helper, shape_inference, version_converter

OPSET = 23                  # the first with Attention
WEIGHTS = 3                 # of qk_matmul_output_mode
SWAPPED = (0, 1, 3, 2)
PASSING = ("Identity", "Dropout")       # operators that change nothing outside of training


def fuse(model: onnx.ModelProto, *, weights: bool = False) -> onnx.ModelProto:
    """Replace attention made of MatMul and Softmax by the operator `Attention`, which attnc and others compute.

    The pattern, in the main graph: scores ``MatMul(Q, transposed K)`` of four axes, optionally times or divided by a
    constant, optionally plus a floating-point mask, `Softmax` over the last axis, and `MatMul` with V. Identity and
    Dropout may occur in between. Other nodes are unchanged.

    Parameters
    ----------
    model : onnx.ModelProto
        Is not modified. The result has at least opset 23.
    weights : bool
        Whether the weights of each `Attention` become outputs of the model, named like the output of the softmax.

    Returns
    -------
    onnx.ModelProto

    Raises
    ------
    TypeError
        If model is not a ModelProto.
    ValueError
        If the model has no such attention.

    Notes
    -----
    A row whose mask is -inf everywhere is NaN by MatMul and Softmax, and 0 by attnc.

    Examples
    --------
    >>> import onnx.parser
    >>> model = onnx.parser.parse_model('''
    ...     <ir_version: 10, opset_import: ["" : 23]>
    ...     one (float[1,2,5,8] q, float[1,2,8,7] k, float[1,2,7,3] v) => (float[1,2,5,3] y) {
    ...         scores = MatMul (q, k)  weights = Softmax (scores)  y = MatMul (weights, v) }
    ... ''')
    >>> [node.op_type for node in fuse(model).graph.node]
    ['Transpose', 'Attention']
    """
    if not isinstance(model, onnx.ModelProto):
        raise TypeError(f"model must be an onnx.ModelProto, got {type(model).__name__}")
    opset = next((x.version for x in model.opset_import if not x.domain), 0)
    found = onnx.ModelProto()
    found.CopyFrom(version_converter.convert_version(model, OPSET) if opset < OPSET else model)
    graph = _Graph(found)
    places = [place for node in found.graph.node if node.op_type == "Softmax" and (place := graph.attention(node))]
    if not places:
        raise ValueError("no attention of MatMul, Softmax over the last axis, and MatMul on four axes in the model")
    graph.replace(places, weights)
    return found


class _Place(NamedTuple):
    """One attention: the inputs and scale of the new node, and the two nodes that it replaces."""

    inputs: list[str]           # query, transposed key, value, and possibly a mask
    scale: float
    softmax: Any
    last: Any


class _Graph:
    """A graph, with its nodes by output, its constants, and inferred types."""

    def __init__(self, model: onnx.ModelProto):
        self.graph = model.graph
        self.maker = {name: node for node in self.graph.node for name in node.output}
        self.constants = {x.name: x for x in self.graph.initializer}
        self.constants |= {node.output[0]: a.t for node in self.graph.node if node.op_type == "Constant"
                           for a in node.attribute if a.name == "value"}
        inferred = shape_inference.infer_shapes(model).graph
        self.types = {x.name: x.type.tensor_type for values in (inferred.input, inferred.value_info, inferred.output)
                      for x in values}

    def shape(self, name: str) -> list[int | None] | None:
        if name in self.constants:
            return list(self.constants[name].dims)
        if name not in self.types or not self.types[name].HasField("shape"):
            return None
        return [d.dim_value if d.HasField("dim_value") else None for d in self.types[name].shape.dim]

    def attention(self, softmax: onnx.NodeProto) -> _Place | None:
        """The attention around a softmax, or None."""
        axis = next((a.i for a in softmax.attribute if a.name == "axis"), -1)
        node, mask, scale = self._before(softmax.input[0]), [], 1.0
        if node is not None and node.op_type == "Add":
            parts = [(self._product(x), other) for x, other in zip(node.input, reversed(node.input), strict=True)]
            found, other = next((x for x in parts if x[0] is not None), (None, ""))
            node, scale = found or (None, 1.0)
            shape, mask = self.shape(other), [other]
            if shape is None or not 2 <= len(shape) <= 4 or shape[-1] == 1:     # Attention would not broadcast its keys
                return None
        elif node is not None:
            node, scale = self._product(softmax.input[0]) or (None, 1.0)
        last = self._after(softmax.output[0])
        if node is None or last is None:
            return None
        inputs = [*node.input, last.input[1]]
        ranks = {len(self.shape(name) or ()) for name in (*inputs, softmax.input[0])}
        return _Place(inputs + mask, scale, softmax, last) if ranks == {4} and axis in (-1, 3) else None

    def _before(self, name: str) -> onnx.NodeProto | None:
        """The node that computes a value, skipping nodes that pass it on."""
        node = self.maker.get(name)
        while node is not None and node.op_type in PASSING:
            node = self.maker.get(node.input[0])
        return node

    def _after(self, name: str) -> onnx.NodeProto | None:
        """The MatMul whose first factor is a value, skipping nodes that pass it on."""
        for node in self.graph.node:
            if name in node.input[:1] and node.op_type in (*PASSING, "MatMul"):
                found = node if node.op_type == "MatMul" else self._after(node.output[0])
                if found is not None:
                    return found
        return None

    def _product(self, name: str) -> tuple[onnx.NodeProto, float] | None:
        """The MatMul that computes a value, and the constant that multiplies it."""
        node, scale = self._before(name), 1.0
        if node is not None and node.op_type in ("Mul", "Div"):
            factors = [(x, self._number(y)) for x, y in zip(node.input, reversed(node.input), strict=True)]
            factors = factors[:1] if node.op_type == "Div" else factors
            value, number = next((x for x in factors if x[1] is not None), ("", None))
            if number is None or number == 0:
                return None
            scale = 1 / number if node.op_type == "Div" else number
            node = self._before(value)
        return (node, scale) if node is not None and node.op_type == "MatMul" else None

    def _number(self, name: str) -> float | None:
        if name not in self.constants or len(self.constants[name].dims) > 4:
            return None
        array = numpy_helper.to_array(self.constants[name])
        return float(array.item()) if array.size == 1 else None

    def replace(self, places: list[_Place], weights: bool) -> None:
        """Replace each pattern by an Attention node, and remove nodes that are no longer used."""
        nodes, unused = list(self.graph.node), self._unused(self.graph.node)
        replaced = {node.output[0] for place in places for node in (place.softmax, place.last)}
        nodes = [x for x in nodes if x.output[0] not in replaced]
        nodes += [node for place in places for node in self._nodes(place, weights, nodes)]
        while gone := self._unused(nodes) - unused:
            nodes = [x for x in nodes if x.output[0] not in gone]
        del self.graph.node[:]
        self.graph.node.extend(_in_order(nodes))

    def _nodes(self, place: _Place, weights: bool, others: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
        (query, key, value, *mask), seen, order = place.inputs, place.softmax.output[0], list(SWAPPED)
        nodes, maker = [], self.maker.get(key)
        if maker is not None and maker.op_type == "Transpose":
            perm = next((list(a.ints) for a in maker.attribute if a.name == "perm"), [3, 2, 1, 0])
            key, order = maker.input[0], [perm[axis] for axis in SWAPPED]
        if order != sorted(order):
            nodes.append(helper.make_node("Transpose", [key], [f"{seen}.key"], perm=order))
            key = f"{seen}.key"
        if weights and seen not in (x.name for x in self.graph.output):
            self.graph.output.append(helper.make_tensor_value_info(seen, self.types[seen].elem_type, [None] * 4))
        kept = seen in _taken(others) | {x.name for x in self.graph.output}
        return [*nodes, helper.make_node(
            "Attention", [query, key, value, *mask], [place.last.output[0], *(("", "", seen) if kept else ())],
            name=place.softmax.name, scale=place.scale, **({"qk_matmul_output_mode": WEIGHTS} if kept else {}))]

    def _unused(self, nodes: Iterable[onnx.NodeProto]) -> set[str]:
        taken = _taken(nodes) | {x.name for x in self.graph.output}
        return {node.output[0] for node in nodes if not taken.intersection(node.output)}


def _taken(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    """Names of the inputs of nodes, also within graphs in their attributes."""
    found = set()
    for node in nodes:
        found.update(node.input)
        for a in node.attribute:
            for graph in (a.g, *a.graphs):
                found |= _taken(graph.node) | {x.name for x in graph.output}
    return found - {""}


def _in_order(nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """The nodes in topological order."""
    made = {name: node for node in nodes for name in node.output if name}
    done: dict[str, onnx.NodeProto] = {}
    waiting = list(reversed(nodes))
    while waiting:
        node = waiting[-1]
        first = [made[x] for x in _taken([node]) if x in made and made[x].output[0] not in done]
        if first and node.output[0] not in done:
            waiting += first
        else:
            done.setdefault(waiting.pop().output[0], node)
    return list(done.values())
