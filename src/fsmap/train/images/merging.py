"""Convolutions by the same weights as one convolution of all their images.

A step with ``jvp`` convolves training points, evaluation points and tangents by the same weights.
One call for all means fewer kernels, which fill a GPU better where images are small, and weight
gradients that are summed in full precision. Where inductor can, the kernels that make the images
write them side by side, so that they are not copied.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from operator import getitem
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._inductor import inductor_prims
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.fx_utils import get_node_storage
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, Node
from torch.fx.node import map_arg

aten: Any = torch.ops.aten
LAY_OUT: Any = inductor_prims.force_stride_order
ROUND: Any = torch.ops.prims.convert_element_type.default
UNIFIED = (ROUND, aten.var_mean.correction, getitem)
STRIDED = (aten.as_strided.default, aten.as_strided_scatter.default)
SAME = (aten.alias.default, aten.detach.default)
WEIGHTS, MASK = 2, -1  # where a derivative has its arguments


class MergeConvolutions(CustomGraphPass):
    """A pass of inductor's, over operations without side effects."""

    def __call__(self, graph: Graph) -> None:
        """Merge convolutions, then their derivatives.

        Args:
            graph: Changed in place.
        """
        _unify(graph)
        merged = _Merged(graph)
        merged.drop_zeros()
        for group in _groups(graph, aten.convolution.default, [*range(1, 9)]):
            if not _ancestors(group).intersection(group):
                merged.convolve(group)
        for group in _groups(graph, aten.convolution_backward.default, [WEIGHTS, *range(4, 10)]):
            if not _ancestors(group).intersection(group):
                merged.differentiate(group)
        stable_topological_sort(graph)
        graph.lint()

    def uuid(self) -> Any:
        """By which inductor knows its kernels again."""
        return get_hash_for_files((__file__,))


class _Merged:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.pieces: dict[Node, list[Node]] = {}  # of tensors that lie side by side

    def drop_zeros(self) -> None:
        """Convolve nothing: the tangent of images, which are no function of weights, is zero."""
        for node in self.graph.find_nodes(op="call_function", target=aten.convolution.default):
            images, _, bias, *_ = _args(node)
            if bias is None and _is_zero(images):
                with self.graph.inserting_before(node):
                    self._replace(node, self._zero(node))
        target = aten.convolution_backward.default
        for node in self.graph.find_nodes(op="call_function", target=target):
            for user in [u for u in node.users if u.args[1] == 1 and _is_zero(node.args[1])]:
                with self.graph.inserting_before(user):
                    self._replace(user, self._zero(user))
                mask = [flag and i != 1 for i, flag in enumerate(node.args[MASK])]
                node.args = (*node.args[:MASK], mask)
            if not node.users:
                self.graph.erase_node(node)

    def convolve(self, group: list[Node]) -> None:
        """Replace convolutions by pieces of one."""
        whole, group = self._side_by_side(group, 0)
        if whole is None:
            return
        with self.graph.inserting_before(group[-1]):
            made = self._call(group[0].target, whole, *group[0].args[1:])
            for node, piece in zip(group, self._cut(made, group), strict=True):
                self._replace(node, piece)

    def differentiate(self, group: list[Node]) -> None:
        """Replace derivatives by images by pieces of one, those by weights and biases by a sum."""
        takers = [[u for node in group for u in node.users if u.args[1] == i] for i in range(3)]
        if not all(_are_summed(found, len(group)) for found in takers[1:]):
            return
        inputs, group = self._side_by_side(group, 1, known=True)
        if inputs is None:
            return
        grads, order = self._side_by_side(group, 0)
        if grads is None or order != group:  # side by side for another group, in another order
            return
        first = group[0]
        mask = [bool(found) for found in takers]
        with self.graph.inserting_before(group[-1]):
            made = self._call(first.target, grads, inputs, *first.args[WEIGHTS:MASK], mask)
            for i in filter(mask.__getitem__, range(3)):
                result = self._call(getitem, made, i)
                if i:
                    pieces = self._share(result, takers[i])
                else:
                    pieces = self._cut(result, [_args(node)[1] for node in group])
                    pieces = [pieces[group.index(_args(user)[0])] for user in takers[0]]
                for user, piece in zip(takers[i], pieces, strict=True):
                    self._replace(user, piece)
        for node in group:
            self.graph.erase_node(node)

    def _side_by_side(
        self, group: list[Node], place: int, *, known: bool = False
    ) -> tuple[Node | None, list[Node]]:
        """One tensor of all that nodes have as an argument, and the nodes in its order."""
        parts = [_args(node)[place] for node in group]
        for whole, pieces in self.pieces.items():
            if set(pieces) == set(parts) and len(pieces) == len(parts):
                return whole, sorted(group, key=lambda node: pieces.index(_args(node)[place]))
        taken = {piece for pieces in self.pieces.values() for piece in pieces}
        if known or len(set(parts)) < len(parts) or taken.intersection(parts):
            return None, group
        with self.graph.inserting_before(group[-1]):
            whole = self._call(aten.cat.default, [*parts[:-1], self._laid_out(parts[-1])])
            pieces = self._cut(whole, parts)
        before = {whole, *_ancestors([whole])}
        for part, piece in zip(parts, pieces, strict=True):
            part.replace_all_uses_with(piece, lambda user: user not in before)
        self.pieces[whole] = pieces
        return whole, group

    def _laid_out(self, last: Node) -> Node:
        """The part by which inductor lays out the whole, in the layout it has."""
        example = last.meta["val"]
        layouts = (torch.contiguous_format, torch.channels_last)
        if not any(example.is_contiguous(memory_format=layout) for layout in layouts):
            return last
        return self._call(LAY_OUT, last, list(example.stride()))

    def _share(self, total: Node, takers: list[Node]) -> list[Node]:
        """Parts of a sum: all of it, and nothing."""
        return [total, *[self._zero(total)] * (len(takers) - 1)]

    def _zero(self, like: Node) -> Node:
        """Without a layout of its own, so that a sum has that of its other terms."""
        value = like.meta["val"]
        number = self._call(aten.full.default, [], 0, dtype=value.dtype, device=value.device)
        return self._call(aten.expand.default, number, list(value.shape))

    def _cut(self, whole: Node, like: Sequence[Node]) -> list[Node]:
        pieces, start = [], 0
        for node in like:
            stop = start + len(node.meta["val"])
            pieces.append(self._call(aten.slice.Tensor, whole, 0, start, stop))
            start = stop
        return pieces

    def _call(self, target: Any, *args: Any, **options: Any) -> Node:
        """A new node, with an example of its result."""
        node = self.graph.call_function(target, args, options)
        examples = map_arg(args, lambda n: n.meta["val"])
        with detect_fake_mode(examples) or nullcontext():
            node.meta["val"] = target(*examples, **options)
        return node

    def _replace(self, node: Node, by: Node) -> None:
        node.replace_all_uses_with(by)
        self.graph.erase_node(node)


def _unify(graph: Graph) -> None:
    """Do once what two passes do with the same tensors: round weights, take moments.

    Other operations stay as they are: inductor repeats what is cheaper than to be stored.
    """
    known: dict[object, Node] = {}
    for node in list(graph.nodes):
        first = node
        if node.target in SAME:
            first = _args(node)[0]
        elif node.target in UNIFIED:
            first = known.setdefault((node.target, _frozen(node.args), repr(node.kwargs)), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _args(node: Node) -> Any:
    """Its arguments, whose types depend on what it calls."""
    return node.args


def _frozen(value: Any) -> object:
    """An argument as a key; 1, 1.0 and True are not the same."""
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    return value if isinstance(value, Node) else (type(value), value)


def _groups(graph: Graph, target: Any, shared: list[int]) -> list[list[Node]]:
    """Calls with equal arguments at the places given, and images of the same size."""
    strided = {
        get_node_storage(_args(node)[0]) for node in graph.nodes if node.target in STRIDED
    } - {None}
    found = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=target):
        near = [node, *node.users, *node.all_input_nodes]
        if strided.intersection(map(get_node_storage, near)):  # where it lies matters to somebody
            continue
        images = node.args[0].meta["val"]
        same = _frozen([node.args[i] for i in shared])
        found[same, images.shape[1:], images.dtype].append(node)
    return [group for group in found.values() if len(group) > 1]


def _is_zero(node: Node) -> bool:
    while node.target in (aten.expand.default, ROUND):
        node = _args(node)[0]
    filled = node.target is aten.full.default and _args(node)[1] == 0
    return filled or node.target in (aten.zeros.default, aten._efficientzerotensor.default)


def _are_summed(nodes: list[Node], number: int) -> bool:
    """Whether there are none, or as many as said and all that matters is their sum."""
    return not nodes or (len(nodes) == number and len({_sum_with(node) for node in nodes}) == 1)


def _sum_with(node: Node) -> Node:
    """The largest sum of which it is a part."""
    while len(node.users) == 1:
        user = next(iter(node.users))
        adds = user.target is aten.add.Tensor and user.args[0] is not user.args[1]
        if user.kwargs or not (adds or user.target is ROUND):
            break
        node = user
    return node


def _ancestors(nodes: list[Node]) -> set[Node]:
    """What they need, directly or not."""
    found: set[Node] = set()
    todo = [a for node in nodes for a in node.all_input_nodes]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found
