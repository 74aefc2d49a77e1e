"""The torch functions that units are followed through, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsmap.assess.wiring import attention, elementwise, layers, shapes

SAME = """dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout contiguous clone
to double float
    type_as detach neg negative positive alias avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d
    adaptive_avg_pool2d adaptive_avg_pool3d interpolate upsample pad"""
HOMOGENEOUS = """relu leaky_relu abs max_pool1d max_pool2d max_pool3d adaptive_max_pool1d
adaptive_max_pool2d
    adaptive_max_pool3d lp_pool1d lp_pool2d"""
SMOOTH = """tanh sigmoid gelu silu elu selu celu softplus mish hardtanh relu6 hardswish hardsigmoid
logsigmoid
    softsign tanhshrink hardshrink softshrink threshold exp expm1 log log1p sqrt rsqrt square pow
    sin cos erf
    atan sinh cosh asinh clamp softmax log_softmax softmin"""
RESHAPE = "view reshape flatten unflatten squeeze unsqueeze view_as reshape_as ravel"
TRANSPOSE = "transpose permute t T mT movedim moveaxis swapaxes swapdims"
REDUCE = "mean sum amax amin max min"
SPLIT = "chunk split split_with_sizes tensor_split unbind"
CONVOLUTION = "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"
NOT_OF_UNITS = """zeros ones empty arange full tensor zeros_like ones_like empty_like full_like
new_zeros new_ones
    new_empty new_full linspace eye tril triu device dtype"""


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Makes a tensor that has nothing to do with units."""


def _table() -> dict[str, Callable[..., None]]:
    groups: dict[str, Callable[..., None]] = {
        SAME: elementwise.same,
        HOMOGENEOUS: elementwise.homogeneous,
        SMOOTH: elementwise.smooth,
        "prelu": elementwise.prelu,
        "add sub": elementwise.add,
        "mul div true_divide multiply divide": elementwise.multiply,
        RESHAPE: shapes.reshape,
        TRANSPOSE: shapes.transpose,
        REDUCE: shapes.reduce,
        SPLIT: shapes.split,
        "cat concat concatenate": shapes.join,
        "__getitem__": shapes.select,
        "expand expand_as": shapes.expand,
        "linear": layers.linear,
        "matmul mm": layers.matmul,
        "addmm": layers.addmm,
        CONVOLUTION: layers.convolution,
        "batch_norm": layers.batch_norm,
        "layer_norm rms_norm": layers.layer_norm,
        "group_norm": layers.group_norm,
        "embedding": layers.embedding,
        "scaled_dot_product_attention": attention.scaled_dot_product,
        "multi_head_attention_forward": attention.multi_head,
        NOT_OF_UNITS: _ignore,
    }
    return {name: handler for names, handler in groups.items() for name in names.split()}


HANDLERS = _table()
