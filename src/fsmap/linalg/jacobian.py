r"""The Jacobian J = ∂f/∂θ at evaluation points: products with vectors, and J in factored form.

A weight W that enters through z = hWᵀ + b alone has a Jacobian of rank T per output: row (s, k) of
its block is $\sum_t \delta_{skt} h_{st}^\top$, with the layer's input h, the cotangent
δ_k = ∂f_k/∂z and the sum over the T places (tokens, pixels) where the layer is applied. For T = 1
the block's share of the Gram matrix is a product of two small ones,

    (JJᵀ)[sk, s'k'] = (δ_sk·δ_s'k') (h_s·h_s' + 1),      ‖J_sk‖² = ‖δ_sk‖² (‖h_s‖² + 1),

(the 1 is the bias) and nothing of size S·K·P is made: for an MLP with layers of width d a Gram
matrix costs (SK)²·d per layer instead of (SK)²·d². Everything is differentiable in the parameters.

How parameters enter is read from the calls that the model makes (``torch.overrides``), not from its
modules: ``F.linear`` in a forward method, shared weights and plain functions are handled like an
``nn.Linear``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from fsmap.errors import ForwardModeError, InputError, UnsupportedModuleError
from fsmap.functional import (
    FAILURES,
    Functional,
    NoiseReplay,
    Replacing,
    State,
    accumulate,
    check_derivatives,
    detached,
    explain,
    flat,
    is_pointwise,
    num_points,
    number,
    outputs,
    take_points,
    with_state,
)
from fsmap.linalg.second_order import REFUSED, REPLACED, REPLACED_FOR_DUALS, Attention, eager_duals
from fsmap.types import Inputs, ModelFn, Params


class Whitening(NamedTuple):
    """A metric g = LLᵀ at given points, 1/S included: maps between outputs and whitened rows."""

    rows: Callable[[Tensor], Tensor]  # [S, K, *] -> [Q, *]   Lᵀu/√S
    adjoint: Callable[[Tensor], Tensor]  # [Q] -> [S, K]      Lv/√S
    size: int  # Q
    local: bool = True  # whether rows of a point depend on that point alone
    scale: float | None = None  # where L/√S is a multiple of the identity: that multiple

    def quadratic(self, u: Tensor) -> Tensor:
        """uᵀgu/S of one output perturbation ``[S, K]``."""
        if self.scale is not None:
            return self.scale**2 * u.square().sum()
        return self.rows(u).square().sum()

    def gram(self, gram: Tensor, S: int) -> Tensor:
        """LᵀGL/S of the inner products G of all rows of J: ``[SK, SK]`` → ``[Q, Q]``."""
        if self.scale is not None:
            return self.scale**2 * gram
        half = self.rows(gram.reshape(S, -1, len(gram)))  # [Q, SK]   LᵀG/√S
        return self.rows(half.mT.reshape(S, -1, self.size))


class Metric(Protocol):
    """Interface of a metric; implementations are in :mod:`fsmap.metric`."""

    def at(self, x: Inputs, out: Tensor) -> Whitening:
        """Resolve at points ``x`` with outputs ``out`` [S, K]."""


class Site(NamedTuple):
    """Where 𝒥 is taken: a model function, its parameters, the points and the metric."""

    f: ModelFn
    params: Params
    x: Inputs  # [S, ...]
    metric: Metric | Tensor | None = None

    def resolve(self, out: Tensor) -> Whitening:
        """The metric at the points, where f returned ``out``."""
        return resolve(self.metric, self.x, out)

    def output(self) -> Tensor:
        """Outputs at the points, ``[S, K]``, without a gradient; the random state is restored."""
        replay = NoiseReplay(self.f, self.params)
        with torch.no_grad():
            out = outputs(self.f, self.params, self.x)
        replay()
        return out


def resolve(metric: Metric | Tensor | None, x: Inputs, out: Tensor) -> Whitening:
    """The metric at the points, where f returned ``out``; without one, g = I."""
    rows = flat(out, x)
    S, K = rows.shape
    if metric is not None:
        from fsmap.linalg.metric import as_metric  # it imports this file

        found = as_metric(metric, S, K).at(x, accumulate(rows))
        if not hasattr(found, "rows"):
            raise InputError(f"at of a metric must return a Whitening, got {type(found).__name__}")
        return found
    scale = 1 / math.sqrt(S)
    return Whitening(
        lambda u: (scale * u).flatten(0, 1), lambda v: (scale * v).reshape(S, K), S * K, scale=scale
    )


class SecondOrder(Replacing):
    """Context manager that replaces functions with wrong or missing second derivatives."""

    def __init__(self, *, forward_mode: bool = False, dual: bool = False) -> None:
        replaced = {**REPLACED, **(REFUSED if forward_mode else {})}
        if dual:
            replaced.update(REPLACED_FOR_DUALS)
        attention = Attention(check=forward_mode)
        fused = torch.ops.aten.scaled_dot_product_attention
        for function in (F.scaled_dot_product_attention, fused, fused.default):
            replaced[function] = attention.dot_product
        replaced[F.multi_head_attention_forward] = attention.heads
        super().__init__(replaced)


def check_replaceable(f: ModelFn, mode: str) -> None:
    """Raise if f has TorchScript parts, whose functions cannot be replaced."""
    scripted = getattr(f, "scripted", ())
    if scripted:
        kind = ForwardModeError if mode == "forward" else UnsupportedModuleError
        raise kind(
            f"{mode}-mode differentiation failed: {scripted[0] or 'the module itself'} is "
            "TorchScript, inside which normalizations have wrong second derivatives (use the "
            "estimator 'fd_central', which needs forward passes only, or the module it was "
            "scripted or traced from)"
        )


CHUNK_BYTES = 2**28  # cotangents of the points that are differentiated together


def jacobian(f: ModelFn, params: Params, x: Inputs) -> Tensor:
    """J as one tensor ``[S, K, P]``, differentiable."""
    return written_out(f, params, x)[0]


def written_out(f: ModelFn, params: Params, x: Inputs) -> tuple[Tensor, Tensor]:
    """:func:`jacobian`, and the outputs ``[S, K]`` of the same passes."""
    parts = [linearize(f, params, part) for part in chunks(f, params, x)]
    if len(parts) == 1:
        return parts[0].rows(), parts[0].out
    return torch.cat([part.rows() for part in parts]), torch.cat([part.out for part in parts])


def chunks(f: ModelFn, params: Params, x: Inputs) -> list[Inputs]:
    """The points in chunks that are differentiated together; one chunk unless f is pointwise."""
    if not alone(f, params, x):
        return [x]
    size = max(1, CHUNK_BYTES // (8 * recorded_calls(f, params, x).numbers_per_point(params)))
    S = num_points(x)
    return [take_points(x, slice(i, i + size)) for i in range(0, S, size)] if size < S else [x]


def jvp(f: ModelFn, params: Params, x: Inputs, psi: Params) -> tuple[Tensor, Tensor, State]:
    """One pass in forward mode: f(x) as f returns it, Jψ ``[S, K]``, the state of the pass."""
    check_replaceable(f, "forward")
    check_derivatives("an estimate in forward mode")

    def call(p: Params) -> tuple[Tensor, State]:
        with SecondOrder(forward_mode=True):
            return with_state(f, p, x)

    try:
        found = _dual(f, params, x, psi) if eager_duals() else None
        out, tangent, state = found or torch.func.jvp(call, (params,), (psi,), has_aux=True)  # type: ignore[misc]
    except FAILURES as error:
        failed = (
            "forward-mode differentiation failed{where} (use the estimator 'fd_central', which "
            "needs forward passes only)"
        )
        explain(error, f, x, params, failed, ForwardModeError)
    return out, flat(tangent, x), state


DUALS_WORK: WeakKeyDictionary[nn.Module, dict[Any, bool]] = WeakKeyDictionary()
"""Whether the gradient of a tangent could be taken, by module, and names and modes of the trial."""


def _dual(
    f: ModelFn, params: Params, x: Inputs, psi: Params
) -> tuple[Tensor, Tensor, State] | None:
    """As ``torch.func.jvp``, in a fifth less time; None if the gradient fails."""
    if not isinstance(f, Functional):
        return None
    tried, trial = DUALS_WORK.setdefault(f.module, {}), (tuple(params), f.modes)
    if not tried.get(trial, True):
        return None
    replay = None if trial in tried else NoiseReplay(f, params)
    with forward_ad.dual_level():
        pairs = {name: forward_ad.make_dual(p, psi[name]) for name, p in params.items()}
        with SecondOrder(forward_mode=True, dual=True):
            out, state = with_state(f, pairs, x)
        value, tangent = forward_ad.unpack_dual(out)
        state = tree_map(lambda t: forward_ad.unpack_dual(t).primal, state)
    tangent = torch.zeros_like(value) if tangent is None else tangent
    # Some formulas of torch for dual tensors change saved tensors in place: try it once.
    if replay is not None and tangent.requires_grad:
        own = [p for p in params.values() if p.requires_grad]
        try:
            torch.autograd.grad(tangent.sum(), own, retain_graph=True, allow_unused=True)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            tried[trial] = False
            replay()
            return None
        tried[trial] = True
    return value, tangent, state


def vjp(f: ModelFn, params: Params, x: Inputs) -> tuple[Tensor, Callable[[Tensor], Params], State]:
    """One pass in reverse mode: f(x), the map u ``[S, K]`` → Jᵀu, the state of the pass."""
    check_replaceable(f, "reverse")
    params = params if torch.is_grad_enabled() else detached(params)

    def call(p: Params) -> tuple[Tensor, State]:
        with SecondOrder():
            return with_state(f, p, x)

    try:
        with torch.enable_grad():  # otherwise LSTM kernels save nothing for a derivative
            out, pull, state = torch.func.vjp(call, params, has_aux=True)  # type: ignore[misc]
    except FAILURES as error:
        explain(error, f, x, params, "reverse-mode differentiation failed{where}")

    def transpose(u: Tensor) -> Params:
        (cotangent,) = pull(u.reshape(out.shape).to(out.dtype))
        return cotangent  # type: ignore[no-any-return]

    return out, transpose, state


def linearize(f: ModelFn, params: Params, x: Inputs) -> Factors:
    """J in factored form, by K reverse passes over the batch if f is :func:`alone`, else S·K."""
    check_replaceable(f, "reverse")
    params = params if torch.is_grad_enabled() else detached(params)
    with torch.enable_grad():
        if alone(f, params, x):
            calls = recorded_calls(f, params, x)
            try:
                return factor(f, params, x, calls)
            except FAILURES:  # other calls than before, control flow on values, random numbers, ...
                _recorded_of(f).clear()
        raw, transpose, _ = vjp(f, params, x)
        out = flat(raw, x)
        each = torch.eye(out.numel(), dtype=out.dtype, device=out.device).reshape(-1, *out.shape)
        try:
            grads = vmap(transpose)(each)  # [SK, ...] each
        except RuntimeError:  # a function that vmap does not know, such as a sparse product
            rows = [transpose(u) for u in each]
            grads = {n: torch.stack([row[n] for row in rows]) for n in params}
    blocks = [Block((n,), g.reshape(*out.shape, 1, -1)) for n, g in grads.items()]
    return Factors(tuple(params), blocks, out)


def factor(f: ModelFn, params: Params, x: Inputs, calls: Calls) -> Factors:
    """J of all outputs at all points, layer by layer, for a pointwise f."""
    S = num_points(x)
    # All points go through f together if the first dimension of every layer is the point: quicker.
    batch = not calls.others and all(call.shape[0] == 1 for call in calls.layers)
    layered = {name: p for name, p in params.items() if name not in calls.others}

    def one(taps: list[Tensor], own: Params, point: Inputs) -> tuple[Tensor, list[Tensor]]:
        with CallRecorder(layered, taps) as recorder:
            out = f({**params, **own}, tree_map(lambda t: t[None], point))
        return out.reshape(-1), recorder.finish(calls)

    def whole(taps: list[Tensor], own: Params) -> tuple[Tensor, list[Tensor]]:
        if not batch:
            return vmap(one)(taps, own, x)
        with CallRecorder(layered, [tap[:, 0] for tap in taps]) as recorder:
            out = f(params, x)
        return flat(out, x), [h[:, None] for h in recorder.finish(calls)]

    like = next(iter(params.values()))
    taps = [like.new_zeros(S, *call.shape) for call in calls.layers]
    own = {n: params[n].expand(S, *params[n].shape) for n in calls.others}
    out, pull, inputs = torch.func.vjp(whole, taps, own, has_aux=True)  # type: ignore[misc]
    K = out.shape[1]
    each = torch.eye(K, dtype=out.dtype, device=out.device)[:, None].expand(K, S, K)
    deltas, dense = vmap(pull)(each)  # [K, S, ...] each
    return Factors(tuple(params), _blocks(calls, inputs, deltas, dense), out)


def _blocks(calls: Calls, inputs: list[Tensor], deltas: list[Tensor], dense: Params) -> list[Block]:
    blocks = [Block((n,), d.transpose(0, 1).flatten(2)[:, :, None]) for n, d in dense.items()]
    for call, h, d in zip(calls.layers, inputs, deltas, strict=True):
        grads = call.grads(d.transpose(0, 1))
        if call.weight:
            names = (call.weight, call.bias) if call.bias else (call.weight,)
            blocks.append(Block(names, grads, call.inputs(h)))
        elif call.bias:
            blocks.append(Block((call.bias,), grads.sum(2, keepdim=True)))
    return blocks


NARROW = 4096  # blocks with fewer columns are concatenated before they are multiplied


class Block(NamedTuple):
    """Columns of J: Σ_t δ hᵀ of a layer's weight, Σ_t δ of its bias; without h, δ itself."""

    names: tuple[str, ...]  # weight and bias, or one parameter
    grads: Tensor  # [S, K, T, o]  δ
    inputs: Tensor | None = None  # [S, T, i]  h

    def columns(self) -> list[Tensor]:
        """The block written out: [S, K, o·i], and [S, K, o] for a bias."""
        S, K, T, o = self.grads.shape
        if self.inputs is None:
            return [self.grads[:, :, 0]]
        if T == 1:
            weight = (self.grads[:, :, 0, :, None] * self.inputs[:, :, None]).flatten(2)
        else:
            weight = (self.grads.mT.reshape(S, K * o, T) @ self.inputs).reshape(S, K, -1)
        return [weight, self.grads.sum(2)][: len(self.names)]

    def products(self) -> tuple[Tensor, Tensor] | None:
        """Inner products of δ ``[SK, SK]`` and of (h, 1) ``[S, S]`` if their product is JJᵀ."""
        S, K, T, _ = self.grads.shape
        if self.inputs is None or T > 1:
            return None
        of_inputs = inner(self.inputs[:, 0].double()) + (len(self.names) - 1)
        return inner(self.grads.reshape(S * K, -1).double()), of_inputs

    def squares(self) -> Tensor:
        """Squared length of every row: [S, K]."""
        if self.inputs is None or self.inputs.shape[1] > 1:
            return reduce(torch.add, (accumulate(c).square().sum(-1) for c in self.columns()))
        of_inputs = accumulate(self.inputs).square().sum((1, 2)) + (len(self.names) - 1)
        return accumulate(self.grads).square().sum((2, 3)) * of_inputs[:, None]


class Factors(NamedTuple):
    """J at S points, block by block, and the outputs of the same pass."""

    names: tuple[str, ...]  # the parameters, in their order
    blocks: list[Block]
    out: Tensor  # [S, K]

    def rows(self) -> Tensor:
        """J written out: [S, K, P]."""
        columns: dict[str, Tensor] = {}
        for block in self.blocks:
            columns |= zip(block.names, block.columns(), strict=True)
        return torch.cat([columns[name] for name in self.names], dim=-1)

    def gram(self) -> Tensor:
        """JJᵀ in float64: [SK, SK]."""
        S, K = self.out.shape
        terms, written = [], []
        for block in self.blocks:
            products = block.products()
            if products is None:
                written += block.columns()
            else:
                of_grads, of_inputs = products[0].reshape(S, -1, S, K), products[1]
                terms.append((of_grads * of_inputs[:, None, :, None]).reshape(S * K, S * K))
        narrow = [c for c in written if c.shape[-1] < NARROW]
        wide = [c for c in written if c.shape[-1] >= NARROW]
        if narrow:
            wide.append(torch.cat(narrow, dim=-1))
        return reduce(torch.add, [*terms, *(inner(c.double().flatten(0, 1)) for c in wide)])

    def squares(self) -> Tensor:
        """Squared length of every row: [S, K]."""
        return reduce(torch.add, (block.squares() for block in self.blocks))

    def mixed(self, mix: Callable[[Tensor], Tensor]) -> Factors:
        """With a linear map [S, K, *] → [S, Q, *] applied to each point's outputs."""
        return self._replace(blocks=[b._replace(grads=mix(b.grads)) for b in self.blocks])


class LinearCall(NamedTuple):
    """One call of a linear map with parameters of the model, at one point."""

    weight: str | None  # names; None where it is not a parameter
    bias: str | None
    shape: tuple[int, ...]  # of the output at one point
    kernel: tuple[int, ...]  # of the weight, without its first dimension: (i,) or (c, *window)
    window: dict[str, Any] | None  # arguments of F.unfold for a convolution

    @property
    def places(self) -> int:
        """T, the number of times that the layer is applied at one point."""
        return math.prod(self.shape) // self.width

    @property
    def width(self) -> int:
        """o, the number of outputs of the layer."""
        return self.shape[-1 if self.window is None else 1]

    def inputs(self, h: Tensor) -> Tensor:
        """Inputs at S points, [S, B, ...], as the rows that the weight multiplies: [S, T, i]."""
        S = len(h)
        if self.window is None:
            return h.reshape(S, self.places, -1)
        patches = F.unfold(h.flatten(0, 1), **self.window)  # [SB, i, L]
        return patches.mT.reshape(S, self.places, -1)

    def grads(self, d: Tensor) -> Tensor:
        """Cotangents of the layer's output, [..., B, ...], as [..., T, o]."""
        lead = d.shape[: d.ndim - len(self.shape)]
        if self.window is None:
            return d.reshape(*lead, self.places, self.width)
        images = d.flatten(len(lead) + 2)  # [..., B, o, L]
        return images.mT.reshape(*lead, self.places, self.width)  # a view where B = 1


class Calls(NamedTuple):
    """How the parameters enter a model, from a pass at one point."""

    layers: tuple[LinearCall, ...]
    others: tuple[str, ...]  # parameters that enter in another way
    outputs: int  # K

    def numbers_per_point(self, params: Params) -> int:
        """Size of all tensors that the Jacobian of one point needs."""
        total = self.outputs * sum(params[name].numel() for name in self.others)
        for call in self.layers:
            fan_in, fan_out = math.prod(call.kernel), self.outputs * call.width
            written = 0 if call.places == 1 else fan_in * fan_out
            total += call.places * (fan_in + fan_out) + written
        return total


_recorded: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()


def alone(f: ModelFn, params: Params, x: Inputs) -> bool:
    """Whether outputs are the same with other points, and in another order; cached."""
    if not is_pointwise(f) or num_points(x) == 1 or torch.compiler.is_compiling():
        return is_pointwise(f)
    known, key = _recorded_of(getattr(f, "_call", f)), (alone, getattr(f, "modes", ()))
    if key not in known:
        with torch.no_grad():
            out = outputs(f, params, x)
            try:
                repeated = tree_map(lambda t: t[:1].repeat_interleave(len(t), 0), x)
                backwards = outputs(f, params, tree_map(lambda t: t.flip(0), x)).flip(0)
                changes = torch.cat([outputs(f, params, repeated)[:1] - out[:1], backwards - out])
                change = number(changes.norm(dim=1).max())
            except InputError:  # such as a factorization of equal points
                change = math.nan
        size = number(out.norm(dim=1).mean())
        if size is None or change is None or not math.isfinite(size):
            return True  # not known yet
        known[key] = change <= 1e-3 * size
    return bool(known[key])


def recorded_calls(f: ModelFn, params: Params, x: Inputs) -> Calls:
    """How the parameters enter f, from a pass at one point; kept for points of this shape."""
    known = _recorded_of(f)
    first = take_points(x, slice(0, 1)) if alone(f, params, x) else x
    leaves = [first] if isinstance(first, Tensor) else tree_leaves(first)
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    key = (tuple((n, p.shape) for n, p in params.items()), getattr(f, "modes", ()), shapes)
    if key not in known:
        replay = NoiseReplay(f, params)
        try:
            known[key] = record(lambda: flat(f(params, first), first), params)
        except FAILURES as error:
            explain(error, f, x)
        replay()
    return known[key]  # type: ignore[no-any-return]


def _recorded_of(f: ModelFn) -> dict[Any, Any]:
    try:
        return _recorded.setdefault(f, {})
    except TypeError:  # f has no weak references
        return {}


def record(call: Callable[[], Tensor], params: Params) -> Calls:
    """The calls of a pass, in order; a parameter without exactly one such call counts as other."""
    recorder = CallRecorder(params)
    with torch.no_grad(), recorder:
        out = call()
    times = Counter(name for call in recorder.layers for name in (call.weight, call.bias))
    known = {name for name, n in times.items() if n == 1} - recorder.others
    keep = {name: name for name in known}.get
    layers = tuple(c._replace(weight=keep(c.weight), bias=keep(c.bias)) for c in recorder.layers)
    return Calls(layers, tuple(name for name in params if name not in known), out.numel())


OTHER_CALLS = "the model makes other calls than before"


class CallRecorder(SecondOrder):
    """Records the uses of parameters; with taps, adds tap i to the output of linear call i."""

    def __init__(self, params: Params, taps: Sequence[Tensor] | None = None) -> None:
        super().__init__()
        self._names = {id(p): name for name, p in params.items()}
        self._taps = taps
        self.layers: list[LinearCall] = []
        self.inputs: list[Tensor] = []  # [B, ...] of each layer
        self.others: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function; record what it does with parameters."""
        kwargs = kwargs or {}
        out = super().__torch_function__(func, types, args, kwargs)
        used = {self._names[id(t)] for t in tree_leaves((args, kwargs)) if id(t) in self._names}
        if not used or not any(isinstance(t, Tensor) for t in tree_leaves(out)):
            return out  # no parameter, or a question about its shape or dtype
        linear = LINEAR_MAPS[func](*args, **kwargs) if func in LINEAR_MAPS else None
        if linear is None or id(linear[0]) in self._names:
            self.others |= used
            return out
        assert isinstance(out, Tensor)
        h, weight, bias, window = linear
        names = self._names.get(id(weight)), self._names.get(id(bias))
        self.layers.append(LinearCall(*names, tuple(out.shape), tuple(weight.shape[1:]), window))
        self.inputs.append(h)
        if self._taps is None:
            return out
        index = len(self.layers) - 1
        if index >= len(self._taps) or self._taps[index].shape != out.shape:
            raise RuntimeError(OTHER_CALLS)
        return out + self._taps[index].to(out.dtype)

    def finish(self, known: Calls) -> list[Tensor]:
        """The inputs of all calls; raises RuntimeError if they are not the known ones."""
        if self.others or [c[:2] for c in self.layers] != [c[:2] for c in known.layers]:
            raise RuntimeError(OTHER_CALLS)
        return self.inputs


Arguments = tuple[Tensor, Tensor, Tensor | None, dict[str, Any] | None]
"""Input, weight, bias and window of a linear map."""


def _conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Arguments | None:
    if groups != 1 or isinstance(padding, str) or input.ndim != 4:
        return None
    window = {"stride": stride, "padding": padding, "dilation": dilation}
    return input, weight, bias, {"kernel_size": tuple(weight.shape[2:]), **window}


LINEAR_MAPS: dict[Callable[..., Any], Callable[..., Arguments | None]] = {
    F.linear: lambda input, weight, bias=None: (input, weight, bias, None),
    F.conv2d: _conv2d,
}


LEAST = 2**17  # entries of A from which the custom gradient is faster


def inner(rows: Tensor) -> Tensor:
    """Inner products of all pairs of rows, ``[n, p]`` → ``[n, n]``."""
    if rows.numel() < LEAST or not rows.requires_grad:
        return rows @ rows.mT
    product: Tensor = _Inner.apply(rows)  # type: ignore[no-untyped-call]
    return product


class _Inner(torch.autograd.Function):
    """The gradient (C + Cᵀ)A is one product; autograd would make two, CA and CᵀA."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor) -> Tensor:
        return rows @ rows.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
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
