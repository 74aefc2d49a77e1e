"""Old names of what is in :mod:`fsmap.functional` now."""

__all__ = [
    *("HALF", "accumulate", "check", "check_params", "check_positive", "concat", "count", "flat"),
    *("is_pointwise", "number", "outputs", "take", "to"),
]
