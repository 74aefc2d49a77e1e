"""Tables: ``fsmap fit``, ``fsmap predict`` and the scikit-learn estimators."""
