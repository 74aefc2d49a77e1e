"""Replacements for torch functions whose second derivatives are wrong or missing.

The fused normalizations treat mean and deviation as constants in the derivative. A first
derivative is right, but a gradient taken through ``torch.func.jvp``, or through a ``vjp`` inside
``vmap``, misses the terms in which they depend on the input: no error, and wrong by tens of percent
(pytorch issues 196699 and 196700 for the forward mode, functorch 534 for ``vmap``).
While J is taken, :class:`fsmap.linalg.jacobian.SecondOrder` calls the functions of this file.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.return_types import linalg_slogdet  # type: ignore[attr-defined]

from fsmap.errors import ForwardModeError
from fsmap.functional import SHARE, accumulate, fits, free_bytes

ATTENTION_COPIES = 6
"""Matrices of scores, in float32, that a pass in forward mode and its backward pass keep."""


@dataclass
class Attention:
    """Attention written out, softmax(QKᵀ)V, in one pass; ``check`` predicts its memory."""

    check: bool
    kept: int = 0  # bytes that attention keeps for the backward pass, over all calls

    def dot_product(self, query: Tensor, key: Tensor, *args: Any, **options: Any) -> Tensor:
        """``F.scaled_dot_product_attention``."""
        self._keep(query.numel() // query.shape[-1] * key.shape[-2], query)
        return scaled_dot_product_attention(query, key, *args, **options)

    def heads(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """``F.multi_head_attention_forward``."""
        query, key, _, _, heads = args[:5]
        batch = query.shape[1] if query.ndim == 3 else 1
        self._keep(batch * heads * query.shape[0] * key.shape[0], query)
        return multi_head_attention_forward(*args, **options)

    def _keep(self, scores: int, query: Tensor) -> None:
        """Raise if the scores of all attention layers so far do not fit into memory."""
        self.kept += ATTENTION_COPIES * 4 * scores
        if not self.check or torch.compiler.is_compiling() or fits(self.kept, query.device):
            return
        limit = SHARE * free_bytes(query.device)
        raise ForwardModeError(
            "forward-mode differentiation needs attention written out, about "
            f"{self.kept / 1e9:.1f} GB for queries of shape {tuple(query.shape)}, and "
            f"{limit / 1e9:.1f} GB may be used. Use fewer or shorter evaluation points, or the "
            "estimator 'fd_central', which needs forward passes only."
        )


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention`` from functions with all derivatives."""
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if is_causal:
        size = (query.shape[-2], key.shape[-2])
        attn_mask = torch.ones(size, dtype=torch.bool, device=query.device).tril()
    extra = _padding(key)
    if extra:
        if attn_mask is None:
            attn_mask = torch.ones(1, dtype=torch.bool, device=key.device)
        ignored = False if attn_mask.dtype == torch.bool else -math.inf
        attn_mask = attn_mask.expand(*attn_mask.shape[:-1], key.shape[-2])
        attn_mask = F.pad(attn_mask, (0, extra), value=ignored)
        key, value = F.pad(key, (0, 0, 0, extra)), F.pad(value, (0, 0, 0, extra))
    scores = torch.ops.aten.mul.Scalar(query, scale) @ key.mT
    empty = None  # queries that may see no key: torch returns 0 for them, not NaN
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = _added(~attn_mask, scores)
        if not is_causal:
            empty = (attn_mask == -math.inf).all(-1, keepdim=True)
            attn_mask = attn_mask.masked_fill(empty, 0.0)
        scores = add(scores, attn_mask)
    weights = (softmax if eager_duals() else torch.softmax)(scores, -1)
    weights = weights if empty is None else weights.masked_fill(empty, 0.0)
    if dropout_p:
        weights = dropout(weights, dropout_p)
    return weights.to(value.dtype) @ value


def _padding(key: Tensor) -> int:
    """Keys to add: matrix products on GPUs are slow for lengths that are no multiple of eight."""
    return -key.shape[-2] % 8 if key.is_cuda else 0


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    width: int,
    heads: int,
    in_weight: Tensor | None,
    in_bias: Tensor | None,
    *args: Any,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """``F.multi_head_attention_forward`` with attention written out."""
    names = ("bias_k", "bias_v", "add_zero_attn", "dropout_p", "out_weight", "out_bias")
    given = dict(zip(names, args, strict=False))
    need_weights = options.get("need_weights", True)
    rare = given["bias_k"] is not None or given["add_zero_attn"] or options.get("static_k")
    if need_weights or rare or in_weight is None or query.ndim != 3 or len(args) != len(names):
        # torch writes attention out itself if its weights are returned
        more = {"need_weights": True, "average_attn_weights": False} if not need_weights else {}
        first = (query, key, value, width, heads, in_weight, in_bias)
        out, weights = F.multi_head_attention_forward(*first, *args, **{**options, **more})
        return out, weights if need_weights else None

    def split(x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, heads, width // heads).permute(2, 1, 3, 0, 4)

    if query is key and key is value:
        q, k, v = split(F.linear(query, in_weight, in_bias))  # [B, H, L, D] each
    else:
        biases = (None,) * 3 if in_bias is None else in_bias.chunk(3)
        parts = zip((query, key, value), in_weight.chunk(3), biases, strict=True)
        q, k, v = (split(F.linear(*part))[0] for part in parts)
    mask = _joint_mask(options.get("attn_mask"), options.get("key_padding_mask"), q)
    dropout = given["dropout_p"] if options.get("training", True) else 0.0
    out = scaled_dot_product_attention(q, k, v, mask, dropout)
    out = out.permute(2, 0, 1, 3).flatten(2)
    return F.linear(out, given["out_weight"], given["out_bias"]), None


def _joint_mask(mask: Tensor | None, padding: Tensor | None, query: Tensor) -> Tensor | None:
    """The mask to add to the scores ``[B, H, L, S]``; bool masks are True where to ignore."""
    if mask is not None:
        mask = _added(mask.unflatten(0, query.shape[:2]) if mask.ndim == 3 else mask, query)
    if padding is None:
        return mask
    ignored = _added(padding, query)[:, None, None]
    return ignored if mask is None else mask + ignored


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """A mask as numbers to add: -inf where a bool mask is True."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)


def normalize(
    x: Tensor, dims: list[int], eps: float, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(x − mean)/√(variance + ε)·weight + bias, mean and variance, with all derivatives."""
    wide = accumulate(x)
    mean = wide.mean(dims, keepdim=True)
    centered = wide - mean
    var = centered.square().mean(dims, keepdim=True)
    # In forward mode eager torch makes a tangent of zeros for an operand that has none, in Python:
    # half a millisecond for ``var + eps``. The overloads for scalars have formulas of their own.
    scale: Tensor = torch.ops.aten.add.Scalar(var, eps).rsqrt()
    if weight is not None and weight.numel() == scale.numel():  # small: one pass over x less
        scale, weight = scale * weight, None
    out = centered * scale
    out = out if weight is None else out * weight
    return out if bias is None else out + bias, mean, var


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """``F.layer_norm``, right to second order."""
    out = normalize(input, list(range(-len(normalized_shape), 0)), eps, weight, bias)[0]
    return _rounded(out, input)


def _rounded(out: Tensor, input: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An output in ``dtype`` or the input's, but in float32 where autocast on a GPU keeps that."""
    single = dtype is None and input.is_cuda and torch.is_autocast_enabled("cuda")
    return out if single else out.to(dtype or input.dtype)


class BatchNorm(NamedTuple):
    """The arguments of ``F.batch_norm``: the signature of every function that replaces it."""

    input: Tensor  # [n, C, ...]
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5

    def fixed(self) -> Tensor:
        """The output with running statistics, in the input's dtype."""
        # Under autocast a CPU would give a half-precision input a tangent in full precision.
        x, mean = self.input, self.running_mean
        same = x if mean is None else x.to(mean.dtype)
        return F.batch_norm(same, *self[1:5], False, *self[6:]).to(x.dtype)


def batch_norm(*args: Any, **options: Any) -> Tensor:
    """``F.batch_norm``, right to second order where statistics are those of the batch."""
    call = BatchNorm(*args, **options)
    if not call.training:
        return call.fixed()
    x = call.input
    dims = [d for d in range(x.ndim) if d != 1]
    weight, bias = _per_channel(call.weight, x), _per_channel(call.bias, x)
    out, mean, var = normalize(x, dims, call.eps, weight, bias)
    if call.running_mean is not None:
        assert call.running_var is not None
        n = x.numel() // x.shape[1]
        unbiased = torch.ops.aten.mul.Scalar(var, n / max(n - 1, 1))
        with torch.no_grad():
            for running, now in ((call.running_mean, mean), (call.running_var, unbiased)):
                running.lerp_(now.detach().flatten().to(running.dtype), call.momentum)
    return out.to(x.dtype)


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``F.instance_norm``, right to second order where statistics are those of the input."""
    if not use_input_stats:
        return F.instance_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    if running_mean is not None:  # updated by the fused kernel, as in batch_norm
        with torch.no_grad():
            primal = forward_ad.unpack_dual(input).primal.detach()
            F.instance_norm(primal, running_mean, running_var, momentum=momentum)
    weight, bias = _per_channel(weight, input), _per_channel(bias, input)
    return normalize(input, list(range(2, input.ndim)), eps, weight, bias)[0].to(input.dtype)


def group_norm(input: Tensor, *args: Any, **options: Any) -> Tensor:
    """``F.group_norm``, whose forward mode takes no channels-last inputs."""
    options.pop("cudnn_enabled", None)  # of torch.group_norm, the last one
    return F.group_norm(input.contiguous(), *args[:4], **options)


def glu(input: Tensor, dim: int = -1) -> Tensor:
    """``F.glu``; the forward-mode derivative of torch's has no derivative."""
    value, gate = input.chunk(2, dim)
    return value * gate.sigmoid()


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """v·g/‖v‖, the norm over all dimensions but ``dim`` (-1: over all of them)."""
    others = [d for d in range(v.ndim) if dim == -1 or d != dim % v.ndim]
    norm: Tensor = v.square().sum(others, keepdim=True).sqrt()
    return v * (g / norm)


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """``F.dropout``; in a compiled graph by a mask: torch cannot trace it at dynamic shapes."""
    if not (training and torch.compiler.is_compiling()):
        return F.dropout(input, p, training, inplace)
    kept = torch.empty_like(input.detach()).bernoulli_(1 - p)
    return input * kept / (1 - p if p < 1 else 1.0)


def solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    """A⁻¹B by the inverse, whose forward-mode derivative can be differentiated."""
    inverse: Tensor = torch.linalg.inv(A)
    if not left:
        return B @ inverse
    vector = B.ndim == 1 or (B.ndim == A.ndim - 1 and B.shape == A.shape[:-1])
    return (inverse @ B[..., None])[..., 0] if vector else inverse @ B


def slogdet(A: Tensor) -> tuple[Tensor, Tensor]:
    """``torch.linalg.slogdet`` by LU factors, whose forward-mode derivative is right."""
    LU, pivots = torch.linalg.lu_factor(A)
    diagonal = LU.diagonal(dim1=-2, dim2=-1)
    swaps = pivots != torch.arange(1, A.shape[-1] + 1, device=A.device)
    sign = torch.where(swaps.sum(-1) % 2 == 0, 1.0, -1.0) * diagonal.sgn().prod(-1)
    log = diagonal.abs().log().sum(-1)
    return linalg_slogdet((sign.to(A.dtype), log))  # type: ignore[no-any-return]


def det(A: Tensor) -> Tensor:
    """``torch.linalg.det``."""
    sign, log = slogdet(A)
    return sign * log.exp()


def logdet(A: Tensor) -> Tensor:
    """``torch.logdet``: nan where the determinant is negative."""
    sign, log = slogdet(A)
    return sign.log() + log if A.is_complex() else torch.where(sign < 0, math.nan, log)


def householder_product(A: Tensor, tau: Tensor) -> Tensor:
    """``torch.linalg.householder_product`` as I − VTVᴴ, with T⁻¹ = diag(1/τ) + triu(VᴴV, 1)."""
    identity = torch.eye(*A.shape[-2:], dtype=A.dtype, device=A.device)
    V, tau = (A.tril(-1) + identity)[..., : tau.shape[-1]], tau[..., None]
    system, right = tau * (V.mH @ V).triu(1), tau * V[..., : A.shape[-1], :].mH
    TV = torch.linalg.solve_triangular(system, right, upper=True, unitriangular=True)
    return torch.sub(identity, V @ TV)


def cholesky_inverse(L: Tensor, upper: bool = False) -> Tensor:
    """``torch.cholesky_inverse``, whose forward-mode derivative is wrong."""
    identity = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    return torch.cholesky_solve(identity.expand_as(L), L, upper=upper)


def select_scatter(input: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    """``torch.select_scatter``, whose rule for ``vmap`` is wrong."""
    place = torch.arange(input.shape[dim], device=input.device) == index % input.shape[dim]
    place = place.reshape([-1] + [1] * (input.ndim - 1 - dim % input.ndim))
    return torch.where(place, src.unsqueeze(dim), input)


def embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **options: Any
) -> Tensor:
    """``F.embedding``: dense, not scaled by frequency, the row of padding a constant."""
    options |= dict(zip(("max_norm", "norm_type"), args, strict=False))
    options |= {"scale_grad_by_freq": False, "sparse": False}
    out = F.embedding(input, weight, padding_idx, **options)
    if padding_idx is None:
        return out
    return torch.where((input == padding_idx % len(weight))[..., None], out.detach(), out)


BAG = list(inspect.signature(F.embedding_bag).parameters)


def embedding_bag(*args: Any, **options: Any) -> Tensor:
    """``F.embedding_bag`` of ``[B, L]``, which has neither forward mode nor a second derivative."""
    given = options | dict(zip(BAG, args, strict=False))
    mode, row, scales = (given.get(name) for name in ("mode", "padding_idx", "per_sample_weights"))
    rare = mode == "max" and row is not None
    if rare or not given.get("offsets") is given.get("max_norm") is None:
        return F.embedding_bag(**given)
    input, weight = given["input"], given["weight"]
    rows = F.embedding(input, weight)
    if mode == "max":
        return rows.amax(1)
    kept: Tensor = (input != (-1 if row is None else row % len(weight))).to(weight.dtype)  # [B, L]
    rows = rows * (kept if scales is None else kept * scales)[..., None]
    return rows.sum(1) if mode == "sum" else rows.sum(1) / kept.sum(1, keepdim=True).clamp(min=1)


def grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``F.grouped_mm``, which has no forward mode, of rows in groups: a product per group."""
    rare = (mat_a.ndim, mat_b.ndim) != (2, 3) or bias is not None or out_dtype is not None
    if offs is None or rare:
        return F.grouped_mm(mat_a, mat_b, offs=offs, bias=bias, out_dtype=out_dtype)
    sizes = offs.diff(prepend=offs.new_zeros(1)).tolist()
    groups = mat_a[: sum(sizes)].split(sizes)
    with torch.autocast(mat_a.device.type, enabled=False):
        out = torch.cat([a @ b for a, b in zip(groups, mat_b, strict=True)])
    return F.pad(out, (0, 0, 0, len(mat_a) - len(out)))


def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """``F.hardsigmoid``, whose derivative has no derivative."""
    return (input / 6 + 0.5).clamp(0, 1)


def _refuse(name: str) -> Callable[..., Any]:
    """Raise where R or its gradient in forward mode would be wrong without an error."""

    def call(*args: Any, **options: Any) -> Any:
        given = [a for a in (*args, *options.values()) if isinstance(a, str)]
        if "scatter" in name and given != ["prod"]:
            return getattr(Tensor, name)(*args, **options)
        how = "Use the estimator 'fd_central', which needs forward passes only."
        raise ForwardModeError(f"torch's {name} has a wrong derivative in forward mode. {how}")

    return call


def _native_layer_norm(
    input: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``torch.native_layer_norm``, which returns the statistics as well."""
    out, mean, var = normalize(input, list(range(-len(shape), 0)), eps, weight, bias)
    return _rounded(out, input), mean, (var + eps).rsqrt()


def _in_torchs_order(function: Callable[..., Tensor], switch: str) -> Callable[..., Tensor]:
    """A function of ``F`` with the arguments of its twin in ``torch``."""
    names = ("input", "weight", "bias", "running_mean", "running_var", switch, "momentum", "eps")

    def call(*args: Any, **options: Any) -> Tensor:
        given = dict(zip((*names, "cudnn_enabled"), args, strict=False)) | options
        given.pop("cudnn_enabled", None)
        return function(**given)

    return call


def _by_name(table: dict[str, Callable[..., Any]]) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Replacements by functions: of torch, its tensors, and ``torch.ops.aten`` (torch.export)."""
    found: dict[Callable[..., Any], Callable[..., Any]] = {}
    for place in (F, torch, Tensor, torch._C._nn, torch._C._linalg, torch.ops.aten):  # type: ignore[attr-defined]
        for name in filter(partial(hasattr, place), table):
            function: Any = getattr(place, name)
            overloads = [getattr(function, o) for o in getattr(function, "overloads", list)()]
            found |= dict.fromkeys([function, *overloads], table[name])
    return found


LAYERS = (layer_norm, group_norm, glu, hardsigmoid, weight_norm, select_scatter)
SAME = (*LAYERS, slogdet, det, logdet, cholesky_inverse, householder_product)
NAMES: dict[str, Callable[..., Any]] = {
    **{start + f.__name__: f for f in SAME for start in ("", "_", "linalg_")},
    "batch_norm": _in_torchs_order(batch_norm, "training"),
    "instance_norm": _in_torchs_order(instance_norm, "use_input_stats"),
    "native_layer_norm": _native_layer_norm,
    "linalg_solve": solve,
    "orgqr": householder_product,
    "grouped_mm": grouped_mm,
    "_grouped_mm": grouped_mm,
    "embedding": lambda weight, indices, padding_idx=-1, *_: embedding(
        indices, weight, padding_idx if padding_idx >= 0 else None
    ),
}
REPLACED = _by_name(NAMES) | {F.batch_norm: batch_norm, F.instance_norm: instance_norm}
REPLACED |= {F.embedding: embedding, F.embedding_bag: embedding_bag, F.dropout: dropout}
WRONG = (
    "linalg_tensorsolve linalg_solve_ex _linalg_solve_ex triangular_solve _linalg_det "
    "_linalg_slogdet linalg_eigh _linalg_eigh native_batch_norm _native_batch_norm_legit "
    "_native_batch_norm_legit_functional scatter_reduce scatter_reduce_"
)
REFUSED = _by_name({name: _refuse(name) for name in WRONG.split()})
"""Functions that are not replaced, and whose forward mode has a wrong derivative (torch 2.13)."""


def logsumexp(input: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """``torch.logsumexp``; see :data:`REPLACED_FOR_DUALS`."""
    largest = input.detach().amax(dim, keepdim=True)
    largest = largest.masked_fill(largest.abs() == math.inf, 0.0)
    out = (input - largest).exp().sum(dim, keepdim=True).log() + largest
    return out if keepdim else out.squeeze(dim)


def softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """``torch.softmax``; see :data:`REPLACED_FOR_DUALS`."""
    wide = accumulate(input if dtype is None else input.to(dtype))
    scores = (wide - wide.detach().amax(dim, keepdim=True)).exp()
    return _rounded(scores / scores.sum(dim, keepdim=True), input, dtype)


def log_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """``torch.log_softmax``; see :data:`REPLACED_FOR_DUALS`."""
    wide = accumulate(input if dtype is None else input.to(dtype))
    return _rounded(wide - logsumexp(wide, dim, keepdim=True), input, dtype)


def _with_stacklevel(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A softmax with the arguments of its twin in ``F``."""

    def call(
        input: Tensor,
        dim: int | None = None,
        _stacklevel: int = 3,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        if dim is None:  # deprecated
            dim = 0 if input.ndim in (0, 1, 3) else 1
        return function(input, dim, dtype)

    return call


def eager_duals() -> bool:
    """Whether dual tensors are torch's own: nothing compiles, no transformation of torch.func."""
    return not torch.compiler.is_compiling() and peek_interpreter_stack() is None


def _arithmetic(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``torch.add``, ``sub``, ``mul`` or ``div``, quicker where one operand has no tangent."""
    with_number = getattr(torch.ops.aten, function.__name__).Scalar

    def call(input: Any, other: Any, **options: Any) -> Tensor:
        x, y = input, other
        if options or not isinstance(x, Tensor) or not eager_duals():
            return function(x, y, **options)
        if isinstance(y, int | float):
            return with_number(x, y)  # type: ignore[no-any-return]
        if forward_ad._current_level < 0 or not isinstance(y, Tensor):
            return function(x, y)
        (a, da), (b, db) = forward_ad.unpack_dual(x), forward_ad.unpack_dual(y)
        if (da is None) == (db is None) or (function is torch.div and da is None):
            return function(x, y)
        value = function(a, b)
        if function in (torch.mul, torch.div):
            tangent = function(a if da is None else da, b if db is None else db)
        else:
            tangent = da if db is None else (db if function is torch.add else -db)
            tangent = tangent.expand_as(value).clone()  # in-place operations change it
        made: Tensor = forward_ad.make_dual(value, tangent.to(value.dtype))
        return made

    return call


add, sub = _arithmetic(torch.add), _arithmetic(torch.sub)
mul, div = _arithmetic(torch.mul), _arithmetic(torch.div)


def _reversed_sub(x: Tensor, y: Any) -> Tensor:
    return torch.ops.aten.rsub.Scalar(x, y) if isinstance(y, int | float) else sub(y, x)


REPLACED_FOR_DUALS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.softmax: _with_stacklevel(softmax),
    F.softmin: _with_stacklevel(lambda input, dim, dtype: softmax(-input, dim, dtype)),
    F.log_softmax: _with_stacklevel(log_softmax),
    **dict.fromkeys((torch.softmax, Tensor.softmax), softmax),
    **dict.fromkeys((torch.log_softmax, Tensor.log_softmax), log_softmax),
    **dict.fromkeys((torch.logsumexp, Tensor.logsumexp), logsumexp),
    **dict.fromkeys((torch.add, Tensor.add), add),
    **dict.fromkeys((torch.sub, Tensor.sub), sub),
    **dict.fromkeys((torch.mul, Tensor.mul), mul),
    **dict.fromkeys((torch.div, Tensor.div), div),
    Tensor.__rsub__: _reversed_sub,
}
"""Functions whose formulas for dual tensors are slow, or change saved tensors in place."""


def _per_channel(t: Tensor | None, x: Tensor) -> Tensor | None:
    return None if t is None else t.reshape(1, -1, *[1] * (x.ndim - 2))
