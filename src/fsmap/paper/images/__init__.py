"""Image classifiers: tables and figures of the paper."""
