r"""The Jacobian J = ∂f/∂θ at evaluation points: products with vectors, and J in factored form.

A weight W that enters through z = hWᵀ + b alone has a Jacobian of rank T per output: row (s, k) of
its block is $\sum_t \delta_{skt} h_{st}^\top$, with the layer's input h, the cotangent
δ_k = ∂f_k/∂z and the sum over the T places (tokens, pixels) where the layer is applied. For T = 1
the block's share of the Gram matrix is a product of two small ones,

    (JJᵀ)[sk, s'k'] = (δ_sk·δ_s'k') (h_s·h_s' + 1),      ‖J_sk‖² = ‖δ_sk‖² (‖h_s‖² + 1),

(the 1 is the bias) and nothing of size S·K·P is made: for an MLP with layers of width d a Gram
matrix costs (SK)²·d per layer instead of (SK)²·d². Everything is differentiable in the parameters.

How parameters enter is read from the calls that the model makes (``torch.overrides``), not from its
modules: ``F.linear`` in a forward method, shared weights and plain functions are seen like an
``nn.Linear``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from fsmap.errors import ForwardModeError
from fsmap.functional import (
    FAILURES,
    NoiseReplay,
    State,
    detached,
    explain,
    flat,
    is_pointwise,
    num_points,
    take_points,
    unravel,
    with_state,
)
from fsmap.linalg.second_order import SecondOrder, check_replaceable
from fsmap.types import Inputs, ModelFn, Params


def jacobian(f: ModelFn, params: Params, x: Inputs, *, chunk: int | None = None) -> Tensor:
    """J as one tensor ``[S, K, P]``, differentiable; ``chunk`` points (or rows) at a time."""
    return linearize(f, params, x, chunk=chunk).rows()


def jvp(f: ModelFn, params: Params, x: Inputs, psi: Params) -> tuple[Tensor, Tensor, State]:
    """One pass in forward mode: f(x) as f returns it, Jψ ``[S, K]``, the state of the pass."""
    check_replaceable(f, "forward")

    def call(p: Params) -> tuple[Tensor, State]:
        with SecondOrder(forward_mode=True):
            return with_state(f, p, x)

    try:
        # torch.autograd.forward_ad is a fifth quicker, but some of its formulas (softmax) change
        # saved tensors in place, so that the gradient of the tangent fails.
        out, tangent, state = torch.func.jvp(call, (params,), (psi,), has_aux=True)  # type: ignore[misc]
    except FAILURES as error:
        failed = (
            "forward-mode differentiation failed{where} (use the estimator 'fd_central', which "
            "needs forward passes only)"
        )
        explain(error, f, x, params, failed, ForwardModeError)
    return out, flat(tangent, x), state


def vjp(f: ModelFn, params: Params, x: Inputs) -> tuple[Tensor, Callable[[Tensor], Params], State]:
    """One pass in reverse mode: f(x), the map u ``[S, K]`` → Jᵀu, the state of the pass."""
    if not torch.is_grad_enabled():  # some kernels then keep nothing for a derivative, such as LSTM
        with torch.enable_grad():
            return vjp(f, detached(params), x)

    check_replaceable(f, "reverse")

    def call(p: Params) -> tuple[Tensor, State]:
        with SecondOrder():
            return with_state(f, p, x)

    failed = "reverse-mode differentiation failed{where}"
    try:
        out, pull, state = torch.func.vjp(call, params, has_aux=True)  # type: ignore[misc]
    except FAILURES as error:
        explain(error, f, x, params, failed)

    def transpose(u: Tensor) -> Params:
        try:
            (cotangent,) = pull(u.reshape(out.shape).to(out.dtype))
        except FAILURES as error:
            explain(error, f, x, params, failed)
        return cotangent  # type: ignore[no-any-return]

    return out, transpose, state


def add(params: Params, scale: float, psi: Params) -> Params:
    """θ + scale·ψ."""
    return {name: p + scale * psi[name] for name, p in params.items()}


def tangents(params: Params, rows: Tensor) -> Params:
    """Vectors ``[..., P]`` as tangents ``{name: [..., *shape]}``, in the parameters' dtype."""
    return unravel(rows.to(next(iter(params.values())).dtype), params)


CHUNK_BYTES = 2**28  # cotangents of the points that are differentiated together

_surveys: WeakKeyDictionary[Any, dict[Any, Survey]] = WeakKeyDictionary()


def linearize(f: ModelFn, params: Params, x: Inputs, *, chunk: int | None = None) -> Factors:
    """J in factored form, differentiable in ``params``.

    If points do not see each other (all but active BatchNorm and dropout) one forward and K reverse
    passes over the batch are made, otherwise S·K of them. ``chunk`` is the number of points (or of
    rows, if points see each other) differentiated at a time.
    """
    check_replaceable(f, "reverse")
    if not torch.is_grad_enabled():  # some kernels then keep nothing for a derivative, such as LSTM
        chunk = chunk or _affordable(f, params, x)
        with torch.enable_grad():
            return linearize(f, detached(params), x, chunk=chunk)
    try:
        if not is_pointwise(f):
            return coupled(f, params, x, chunk=chunk)
        if chunk is None:
            return _alone(f, params, x)
        starts = range(0, num_points(x), chunk)
        parts = [take_points(x, slice(i, i + chunk)) for i in starts]
        return joined([_alone(f, params, part).compact() for part in parts])
    except FAILURES as error:
        explain(error, f, x, params, "reverse-mode differentiation failed{where}")


def look(f: ModelFn, params: Params, x: Inputs) -> Survey:
    """How the parameters enter f, from a pass at one point; remembered for points of this shape."""
    known = _surveys_of(f)
    key = (tuple(params), _signature(f, x))
    if key not in known:
        replay = NoiseReplay(f, params)
        first = take_points(x, slice(0, 1)) if is_pointwise(f) else x
        try:
            known[key] = survey(lambda: flat(f(params, first), first), params)
        except FAILURES as error:
            explain(error, f, x)
        replay()
    return known[key]


def coupled(f: ModelFn, params: Params, x: Inputs, *, chunk: int | None = None) -> Factors:
    """Where points see each other: one reverse pass over the whole batch per output and point."""

    def whole(p: Params) -> Tensor:
        with SecondOrder():
            return flat(f(p, x), x)

    out, pull = torch.func.vjp(whole, params)[:2]
    each = torch.eye(out.numel(), dtype=out.dtype, device=out.device).reshape(-1, *out.shape)
    (grads,) = vmap(pull, chunk_size=chunk)(each)  # [SK, ...] each
    blocks: list[Block] = [Dense((n,), g.reshape(*out.shape, -1)) for n, g in grads.items()]
    return Factors(tuple(params), blocks, out)


def factor(f: ModelFn, params: Params, x: Inputs, seen: Survey, *, batch: bool) -> Factors:
    """J of all outputs at all points, layer by layer, if points do not see each other.

    With ``batch`` all points go through f together, which is quicker: only if the first dimension
    of every layer is the point.
    """
    S = num_points(x)
    watched = {name: p for name, p in params.items() if name not in seen.others}

    def one(taps: list[Tensor], own: Params, point: Inputs) -> tuple[Tensor, list[Tensor]]:
        with Watch(watched, taps) as watch:
            out = f({**params, **own}, tree_map(lambda t: t[None], point))
        return out.reshape(-1), watch.finish()

    def whole(taps: list[Tensor], own: Params) -> tuple[Tensor, list[Tensor]]:
        if not batch:
            return vmap(one)(taps, own, x)
        with Watch(watched, [tap[:, 0] for tap in taps]) as watch:
            out = f(params, x)
        return flat(out, x), [h[:, None] for h in watch.finish()]

    like = next(iter(params.values()))
    taps = [like.new_zeros(S, *use.shape) for use in seen.uses]
    own = {n: params[n].expand(S, *params[n].shape) for n in seen.others}
    out, pull, inputs = torch.func.vjp(whole, taps, own, has_aux=True)  # type: ignore[misc]
    K = out.shape[1]
    each = torch.eye(K, dtype=out.dtype, device=out.device)[:, None].expand(K, S, K)
    deltas, dense = vmap(pull)(each)  # [K, S, ...] each
    return Factors(tuple(params), _blocks(seen, inputs, deltas, dense), out)


def _affordable(f: ModelFn, params: Params, x: Inputs) -> int | None:
    """Points at a time where nothing is kept for a gradient; None for all of them."""
    if not is_pointwise(f):
        return None
    size = CHUNK_BYTES // (8 * look(f, params, x).numbers_per_point(params))
    return None if size >= num_points(x) else max(1, size)


def _alone(f: ModelFn, params: Params, x: Inputs) -> Factors:
    seen = look(f, params, x)
    try:
        return factor(f, params, x, seen, batch=seen.leads)
    except ChangedError:  # not what was surveyed before: look again, and take no layout for granted
        _surveys_of(f).clear()
        seen = look(f, params, x)
    except FAILURES:  # not possible one by one: control flow on values, random numbers, ...
        return coupled(f, params, x)
    try:
        return factor(f, params, x, seen, batch=False)
    except FAILURES:
        return coupled(f, params, x)


def _blocks(seen: Survey, inputs: list[Tensor], deltas: list[Tensor], dense: Params) -> list[Block]:
    """A block per layer; layers that share a parameter are joined, their biases stand alone."""
    blocks: list[Block] = [Dense((n,), d.transpose(0, 1).flatten(2)) for n, d in dense.items()]
    layers = [
        (use, use.inputs(h) if use.weight else h, use.grads(d.transpose(0, 1)))
        for use, h, d in zip(seen.uses, inputs, deltas, strict=True)
    ]
    times = Counter(name for use in seen.uses for name in (use.weight, use.bias) if name)
    for use, h, d in layers:
        if use.weight and use.bias and times[use.weight] == times[use.bias] == 1:
            blocks.append(Outer((use.weight, use.bias), h, d))
    done = {name for block in blocks for name in block.names}
    for name in times.keys() - done:
        mine = [(h, d) for use, h, d in layers if use.weight == name]
        if mine:
            joint = torch.cat([h for h, _ in mine], dim=1), torch.cat([d for _, d in mine], dim=2)
            blocks.append(Outer((name,), *joint))
        else:
            biases = [d.sum(2) for use, _, d in layers if use.bias == name]
            blocks.append(Dense((name,), torch.stack(biases).sum(0)))
    return blocks


def _surveys_of(f: ModelFn) -> dict[Any, Survey]:
    try:
        return _surveys.setdefault(f, {})
    except TypeError:  # cannot be referred to weakly
        return {}


def _signature(f: ModelFn, x: Inputs) -> tuple[Any, ...]:
    """What may change the calls that f makes: shapes of a point, modes of the module's parts."""
    leaves = [x] if isinstance(x, Tensor) else tree_leaves(x)
    return getattr(f, "modes", ()), tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves)


NARROW = 4096  # columns; fewer are multiplied together with others


class Outer(NamedTuple):
    """Block of a linear layer: row (s, k) of its weight is Σ_t δ hᵀ, of its bias Σ_t δ."""

    names: tuple[str, ...]  # weight, or weight and bias
    inputs: Tensor  # [S, T, i]  h
    grads: Tensor  # [S, K, T, o]  δ

    def columns(self) -> list[Tensor]:
        """The block written out: [S, K, o·i], and [S, K, o] for a bias."""
        S, K, T, o = self.grads.shape
        if T == 1:
            weight = (self.grads[:, :, 0, :, None] * self.inputs[:, :, None]).flatten(2)
        else:
            weight = (self.grads.mT.reshape(S, K * o, T) @ self.inputs).reshape(S, K, -1)
        return [weight, self.grads.sum(2)][: len(self.names)]

    def gram(self) -> Tensor:
        """Inner products of all pairs of rows: [SK, SK]."""
        S, K, T, _ = self.grads.shape
        if T > 1:
            return _total(inner(rows.flatten(0, 1)) for rows in self.columns())
        of_grads = inner(self.grads.reshape(S * K, -1)).reshape(S, K, S, K)
        of_inputs = inner(self.inputs[:, 0]) + (len(self.names) - 1)
        return (of_grads * of_inputs[:, None, :, None]).reshape(S * K, S * K)

    def squares(self) -> Tensor:
        """Squared length of every row: [S, K]."""
        if self.inputs.shape[1] > 1:
            return _total(rows.square().sum(-1) for rows in self.columns())
        of_inputs = self.inputs.square().sum((1, 2)) + (len(self.names) - 1)
        return self.grads.square().sum((2, 3)) * of_inputs[:, None]

    def gram_product(self, v: Tensor) -> Tensor:
        """JJᵀv, [R, S, K] → [R, S, K]."""
        R, (S, T, i), bias = len(v), self.inputs.shape, len(self.names) - 1
        pulled = torch.einsum("rsk,skto->rsto", v, self.grads).flatten(1, 2)  # [R, ST, o]
        h = self.inputs.flatten(0, 1)  # [ST, i]
        if S * T <= 2 * i:
            pushed = (inner(h) + bias) @ pulled
        else:
            pushed = h @ (pulled.mT @ h).mT + bias * pulled.sum(1, keepdim=True)
        return torch.einsum("rsto,skto->rsk", pushed.reshape(R, S, T, -1), self.grads)

    def compact(self) -> list[Block]:
        """Written out where that takes less room."""
        S, K, T, o = self.grads.shape
        if self.inputs.numel() + self.grads.numel() <= S * K * o * self.inputs.shape[2]:
            return [self]
        return [Dense((n,), c) for n, c in zip(self.names, self.columns(), strict=True)]

    def to(self, dtype: torch.dtype) -> Outer:
        """In another precision."""
        return Outer(self.names, self.inputs.to(dtype), self.grads.to(dtype))

    def mixed(self, mix: Callable[[Tensor], Tensor]) -> Outer:
        """With a linear map applied to each point's outputs."""
        return self._replace(grads=mix(self.grads))


class Dense(NamedTuple):
    """Block of any other parameter."""

    names: tuple[str]
    values: Tensor  # [S, K, p]

    def columns(self) -> list[Tensor]:
        """The block: [S, K, p]."""
        return [self.values]

    def gram(self) -> Tensor:
        """Inner products of all pairs of rows: [SK, SK]."""
        return inner(self.values.flatten(0, 1))

    def squares(self) -> Tensor:
        """Squared length of every row: [S, K]."""
        return self.values.square().sum(-1)

    def compact(self) -> list[Block]:
        """As it is."""
        return [self]

    def gram_product(self, v: Tensor) -> Tensor:
        """JJᵀv, [R, S, K] → [R, S, K]."""
        rows = self.values.flatten(0, 1)
        return ((v.flatten(1) @ rows) @ rows.mT).reshape(v.shape)

    def to(self, dtype: torch.dtype) -> Dense:
        """In another precision."""
        return Dense(self.names, self.values.to(dtype))

    def mixed(self, mix: Callable[[Tensor], Tensor]) -> Dense:
        """With a linear map applied to each point's outputs."""
        return self._replace(values=mix(self.values))


Block = Outer | Dense


class Factors(NamedTuple):
    """J at S points, block by block, and the outputs of the same pass."""

    names: tuple[str, ...]  # the parameters, in their order
    blocks: list[Block]
    out: Tensor  # [S, K]

    def rows(self) -> Tensor:
        """J written out: [S, K, P]."""
        columns = {
            name: column
            for block in self.blocks
            for name, column in zip(block.names, block.columns(), strict=True)
        }
        return torch.cat([columns[name] for name in self.names], dim=-1)

    def gram(self) -> Tensor:
        """JJᵀ in float64: [SK, SK]."""
        products: list[Outer] = []
        written: list[Tensor] = []
        for block in self.blocks:
            if isinstance(block, Outer) and block.inputs.shape[1] == 1:
                products.append(block)
            else:
                written += block.columns()
        narrow = [c for c in written if c.shape[-1] < NARROW]
        wide = [c for c in written if c.shape[-1] >= NARROW]
        if narrow:
            wide.append(torch.cat(narrow, dim=-1))
        terms = [block.to(torch.float64).gram() for block in products]
        return _total([*terms, *(inner(c.double().flatten(0, 1)) for c in wide)])

    def squares(self) -> Tensor:
        """Squared length of every row: [S, K]."""
        return _total(block.squares() for block in self.blocks)

    def compact(self) -> Factors:
        """Each block in the form that takes less room."""
        return self._replace(blocks=[small for block in self.blocks for small in block.compact()])

    def gram_product(self, v: Tensor) -> Tensor:
        """JJᵀv of several vectors, [R, S, K] → [R, S, K]; no matrix of size [SK, SK] is made."""
        return _total(block.gram_product(v) for block in self.blocks)

    def to(self, dtype: torch.dtype) -> Factors:
        """In another precision."""
        return self._replace(blocks=[block.to(dtype) for block in self.blocks])

    def mixed(self, mix: Callable[[Tensor], Tensor]) -> Factors:
        """With a linear map [S, K, *] → [S, Q, *] applied to each point's outputs."""
        return self._replace(blocks=[block.mixed(mix) for block in self.blocks])


def joined(parts: list[Factors]) -> Factors:
    """The factors of several groups of points, as one."""
    blocks = [
        type(same[0])(
            same[0].names, *(torch.cat(t) for t in zip(*(b[1:] for b in same), strict=True))
        )
        for same in zip(*(part.blocks for part in parts), strict=True)
    ]
    return Factors(parts[0].names, blocks, torch.cat([part.out for part in parts]))


def _total(terms: Iterable[Tensor]) -> Tensor:
    first, *rest = terms
    for term in rest:
        first = first + term
    return first


Window = dict[str, Any]  # stride, padding and dilation of a convolution


class Use(NamedTuple):
    """One call of a linear map with parameters that are watched, at one point."""

    weight: str | None  # names; None where it is not a parameter
    bias: str | None
    shape: tuple[int, ...]  # of the output at one point
    kernel: tuple[int, ...]  # of the weight, without its first dimension: (i,) or (c, *window)
    window: Window | None  # None for a linear layer

    @property
    def places(self) -> int:
        """T, the number of times that the layer is applied at one point."""
        return math.prod(self.shape) // self.width

    @property
    def width(self) -> int:
        """o, the number of outputs of the layer."""
        return self.shape[-1 if self.window is None else 1]

    def inputs(self, h: Tensor) -> Tensor:
        """Inputs of the layer at S points, [S, B, ...], as rows that meet the weight: [S, T, i]."""
        S = len(h)
        if self.window is None:
            return h.reshape(S, self.places, -1)
        flat = h.flatten(0, 1)
        if flat.ndim == 3:  # a convolution in one dimension is one in two
            flat = flat[:, :, None]
        patches = F.unfold(flat, **self.window)  # [SB, i, L]
        return patches.reshape(S, -1, *patches.shape[1:]).mT.reshape(S, self.places, -1)

    def grads(self, d: Tensor) -> Tensor:
        """Cotangents of the layer's output, [..., B, ...], as [..., T, o]."""
        lead = d.shape[: d.ndim - len(self.shape)]
        if self.window is None:
            return d.reshape(*lead, self.places, self.width)
        images = d.flatten(len(lead) + 2)  # [..., B, o, L]
        return images.mT.reshape(*lead, self.places, self.width)  # a view where B = 1


class Survey(NamedTuple):
    """What a pass at one point showed."""

    uses: tuple[Use, ...]
    others: tuple[str, ...]  # parameters that enter in another way
    outputs: int  # K

    @property
    def leads(self) -> bool:
        """Whether the first dimension of every layer is the point: a batch can go through whole."""
        return not self.others and all(use.shape[0] == 1 for use in self.uses)

    def numbers_per_point(self, params: Params) -> int:
        """How many numbers the Jacobian of one point takes while it is made."""
        return self._others(params) + sum(
            factored + (0 if use.places == 1 else written)
            for use, (factored, written) in zip(self.uses, self._sizes(), strict=True)
        )

    def compact_numbers(self, params: Params) -> int:
        """How many it takes afterwards, each block in the form that takes less."""
        return self._others(params) + sum(min(sizes) for sizes in self._sizes())

    def _others(self, params: Params) -> int:
        return self.outputs * sum(params[name].numel() for name in self.others)

    def _sizes(self) -> Iterator[tuple[int, int]]:
        """Numbers of each layer's block at one point: factored, written out."""
        for use in self.uses:
            fan_in, fan_out = math.prod(use.kernel), self.outputs * use.width
            yield use.places * (fan_in + fan_out), fan_in * fan_out


class Watch(SecondOrder):
    """Records the uses of parameters; with taps, adds tap i to the output of use i."""

    def __init__(self, params: Params, taps: Sequence[Tensor] | None = None) -> None:
        super().__init__()
        self._names = {id(p): name for name, p in params.items()}
        self._taps = taps
        self.uses: list[Use] = []
        self.inputs: list[Tensor] = []  # [B, ...] of each use
        self.others: set[str] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the function; note what it does with watched parameters."""
        out = super().__torch_function__(func, types, args, kwargs)
        if not isinstance(out, Tensor | tuple | list):
            return out  # a question about shape or dtype
        seen = {
            self._names[id(t)]
            for t in _flat((*args, *(kwargs or {}).values()))
            if id(t) in self._names
        }
        if not seen or not any(isinstance(t, Tensor) for t in _flat((out,))):
            return out
        call = LINEAR_MAPS[func](*args, **(kwargs or {})) if func in LINEAR_MAPS else None
        if call is None or id(call.input) in self._names:
            self.others |= seen
            return out
        assert isinstance(out, Tensor)
        return self._record(call, out)

    def _record(self, call: Call, out: Tensor) -> Tensor:
        weight, bias = self._names.get(id(call.weight)), self._names.get(id(call.bias))
        kernel = tuple(call.weight.shape[1:])
        self.uses.append(Use(weight, bias, tuple(out.shape), kernel, call.window))
        self.inputs.append(call.input)
        if self._taps is None:
            return out
        index = len(self.uses) - 1
        if index >= len(self._taps) or self._taps[index].shape != out.shape:
            raise ChangedError
        return out + self._taps[index].to(out.dtype)

    def finish(self) -> list[Tensor]:
        """The inputs of all uses; raises ChangedError if they are not those of the taps."""
        if self._taps is not None and (self.others or len(self.uses) != len(self._taps)):
            raise ChangedError
        return self.inputs


class ChangedError(RuntimeError):
    """The model made other calls than it did when it was surveyed."""


class Call(NamedTuple):
    """The arguments of a linear map."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    window: Window | None


def survey(call: Callable[[], Tensor], params: Params) -> Survey:
    """Watch a pass at one point: the uses of ``params`` in the order of the calls.

    A parameter with one use of another kind, or with none that could be seen (compiled code),
    counts as other.
    """
    watch = Watch(params)
    with torch.no_grad(), watch:
        out = call()
    known = {name for use in watch.uses for name in (use.weight, use.bias)} - watch.others

    def keep(name: str | None) -> str | None:
        return name if name in known else None

    uses = tuple(use._replace(weight=keep(use.weight), bias=keep(use.bias)) for use in watch.uses)
    others = tuple(name for name in params if name not in known)
    return Survey(uses, others, out.numel())


def _flat(items: Iterable[Any]) -> Iterator[Any]:
    """Everything in nested lists and tuples."""
    for item in items:
        if isinstance(item, tuple | list):
            yield from _flat(item)
        else:
            yield item


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Call | None:
    return Call(input, weight, bias, None)


def _conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Call | None:
    if groups != 1 or isinstance(padding, str) or input.ndim != weight.ndim or weight.ndim > 4:
        return None

    def pair(value: Any, fill: int) -> tuple[int, int]:
        items = tuple(value) if isinstance(value, Sequence) else (value,) * (weight.ndim - 2)
        return (fill, items[0]) if len(items) == 1 else (items[0], items[1])

    window = {
        "kernel_size": pair(tuple(weight.shape[2:]), 1),
        "stride": pair(stride, 1),
        "padding": pair(padding, 0),
        "dilation": pair(dilation, 1),
    }
    return Call(input, weight, bias, window)


LINEAR_MAPS: dict[Callable[..., Any], Callable[..., Call | None]] = {
    F.linear: _linear,
    F.conv1d: _conv,
    F.conv2d: _conv,
}


BLOCK = 256  # rows of a block; smaller ones do not keep a matrix product busy
LEAST = 2**17  # numbers in A from which it pays


def inner(rows: Tensor) -> Tensor:
    """Inner products of all pairs of rows, ``[n, p]`` → ``[n, n]``."""
    if rows.numel() < LEAST or not rows.requires_grad:
        return _lower_and_mirrored(rows)
    product: Tensor = _Inner.apply(rows)  # type: ignore[no-untyped-call]
    return product


def _lower_and_mirrored(rows: Tensor) -> Tensor:
    n, p = rows.shape
    if n < 2 * BLOCK or p < BLOCK:
        return rows @ rows.mT
    bands = []
    for start in range(0, n, BLOCK):
        end = min(start + BLOCK, n)
        bands.append(F.pad(rows[start:end] @ rows[:end].mT, (0, n - end)))
    lower = torch.cat(bands)
    return lower.tril() + lower.tril(-1).mT


class _Inner(torch.autograd.Function):
    """The gradient (C + Cᵀ)A is one product; autograd would make two, CA and CᵀA."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor) -> Tensor:
        return _lower_and_mirrored(rows)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (rows,) = ctx.saved_tensors
        product: Tensor = (grad + grad.mT) @ rows
        return product

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        (rows,) = ctx.saved_tensors
        half: Tensor = tangent @ rows.mT
        return half + half.mT
