"""Old names of what is in :mod:`fsmap.functional` now."""

from fsmap.functional import (
    HALF,
    accumulate,
    check_params,
    check_positive,
    flat,
    is_pointwise,
    number,
    outputs,
)
from fsmap.functional import check_points as check
from fsmap.functional import concat_points as concat
from fsmap.functional import move_points as to
from fsmap.functional import num_points as count
from fsmap.functional import take_points as take

__all__ = [
    *("HALF", "accumulate", "check", "check_params", "check_positive", "concat", "count", "flat"),
    *("is_pointwise", "number", "outputs", "take", "to"),
]
