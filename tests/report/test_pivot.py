"""One column per metric."""

from __future__ import annotations

from fsmap.report.pivot import pivot


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


def test_another_table_stays():
    table = [{"run": "a", "nll": 1.0}, entry("nll", 2.0)]
    assert pivot(table) == table
