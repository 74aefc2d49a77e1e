"""One column per metric."""

from __future__ import annotations

from fsmap.paper.report.view import pivot


def entry(metric: str, ours: float, **more: object) -> dict[str, object]:
    return {"dataset": "fmnist", "px": None, "metric": metric, "ours": ours, "runs": 3, **more}


def test_lines_of_one_run_become_one():
    table = [
        entry("accuracy", 93.91, stderr=0.12, paper=93.9, paper_stderr=0.1),
        entry("nll_scaled", 0.2),
        {**entry("accuracy", 95.0), "dataset": "cifar10"},
    ]
    first, second = pivot(table)
    assert first == {
        "dataset": "fmnist",
        "px": None,
        "accuracy %": "93.91 ± 0.12 (93.90 ± 0.10)",
        "NLL after T": "0.2",
        "runs": 3,
    }
    assert second["accuracy %"] == "95"
    assert list(second) == list(first)  # the same columns in the same order, blank or not
    assert second["NLL after T"] == ""


def test_another_table_stays():
    table = [{"run": "a", "nll": 1.0}, entry("nll", 2.0)]
    assert pivot(table) == table


def test_a_column_per_method_says_what_differs():
    line = {"dataset": "boston", "protocol": "fair", "stderr": 0.01, "runs": 20}
    table = [
        {**line, "method": "L-MAP", "ours": 0.3, "reg_strength": 1e-5, "edge": "λ↓", "paper": 0.35},
        {**line, "method": "scikit-learn MLP", "ours": 0.4, "alpha": 1.0, "edge": None, "runs": 5},
        {**line, "method": "once", "ours": 0.5, "runs": 1},
    ]
    assert pivot(table, "method") == [
        {
            "dataset": "boston",
            "protocol": "fair",
            "L-MAP": "0.300 ± 0.010 (0.35) λ↓",
            "scikit-learn MLP": "0.400 ± 0.010, 5 runs",
            "once": "0.500 ± 0.010, 1 run",
            "runs": 20,
        }
    ]
