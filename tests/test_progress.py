"""Progress: plain lines in a log, a bar of rich's on a terminal, silence inside another bar."""

from __future__ import annotations

import io

import pytest

from fsmap import progress as module
from fsmap.progress import Plain, Silent, progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_plain_lines_come_now_and_then_with_the_time_left(clock):
    stream = io.StringIO()
    with progress(10, "fourier", stream=stream) as bar:
        assert isinstance(bar, Plain)
        clock[0] = 1.0
        bar.advance(2)
        assert stream.getvalue() == ""
        clock[0] = 20.0
        bar.update(text="n_train=400")
        clock[0] = 25.0
        bar.update(5)
        clock[0] = 40.0
        bar.update(8)
    lines = ["fourier   20%  20 s, 1 min 20 s left  n_train=400"]
    lines += ["fourier   80%  40 s, 13 s left  n_train=400"]  # 6 in 39 s
    assert stream.getvalue().splitlines() == lines


def test_the_time_left_leaves_out_what_came_before_the_first_step(clock):
    """Compiling, and what an earlier run has done."""
    stream = io.StringIO()
    with progress(1000, "run", stream=stream) as bar:
        clock[0] = 100.0
        bar.update(1)  # too little to tell
        clock[0] = 120.0
        bar.update(41)
    with progress(1000, "resumed", stream=stream) as bar:
        bar.update(800)
        clock[0] = 140.0
        bar.update(810)
    lines = ["run    0%  1 min 40 s", "run    4%  2 min 00 s, 8 min 00 s left"]
    assert stream.getvalue().splitlines() == [*lines, "resumed   81%  20 s, 6 min 20 s left"]


def test_nothing_is_known_at_the_start():
    for total in (10, 0):
        bar = Plain(total, "a", io.StringIO())
        assert bar.line(bar.start + 3.0) == "a    0%  3.0 s"


def test_a_bar_inside_a_bar_and_a_silent_one_say_nothing(clock):
    stream = io.StringIO()
    with progress(1, "outer", stream=stream), progress(1, "inner", stream=stream) as inner:
        assert isinstance(inner, Silent)
        clock[0] = 100.0
        inner.advance()
        inner.update(1.0, "done")
    with progress(1, "silent", silent=True, stream=stream) as bar:
        assert isinstance(bar, Silent)
    assert stream.getvalue() == ""


def test_the_outer_bar_is_free_again_after_an_error():
    with pytest.raises(RuntimeError, match="boom"), progress(1, "a", stream=io.StringIO()):
        raise RuntimeError("boom")
    with progress(1, "b", stream=io.StringIO()) as bar:
        assert isinstance(bar, Plain)


def test_rich_on_a_terminal():
    stream = Terminal()
    with progress(4, "four[ier]", stream=stream) as bar:
        bar.advance()
        bar.update(text="n[train]=3")
        bar.update(3)
    assert "four[ier]" in stream.getvalue()


def test_plain_on_a_terminal_without_rich(monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with progress(1, "a", stream=Terminal()) as bar:
        assert isinstance(bar, Plain)
