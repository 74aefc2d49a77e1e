"""Progress: plain lines in a log, a bar of rich's on a terminal, silence inside another bar."""

from __future__ import annotations

import io

import pytest

from fsmap import progress as module
from fsmap.progress import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_plain_lines_come_now_and_then(clock):
    stream = io.StringIO()
    with progress(10, "fourier", stream=stream) as bar:
        clock[0] = 1.0
        bar.advance(2)
        assert stream.getvalue() == ""
        clock[0] = 20.0
        bar.update(text="n_train=400")
        clock[0] = 25.0
        bar.update(5)
        clock[0] = 40.0
        bar.update(8, "")
    lines = ["fourier   20%  20 s  n_train=400", "fourier   80%  40 s"]
    assert stream.getvalue().splitlines() == lines


def test_a_bar_inside_a_bar_and_a_silent_one_say_nothing(clock):
    stream = io.StringIO()
    with progress(1, "outer", stream=stream), progress(1, "inner", stream=stream) as inner:
        clock[0] = 100.0
        inner.advance()
        inner.update(1.0, "done")
    with progress(1, "silent", silent=True, stream=stream) as bar:
        clock[0] = 200.0
        bar.advance()
    assert stream.getvalue() == ""


def test_the_outer_bar_is_free_again_after_an_error(clock):
    stream = io.StringIO()
    with pytest.raises(RuntimeError, match="boom"), progress(1, "a", stream=stream):
        raise RuntimeError("boom")
    with progress(1, "b", stream=stream) as bar:
        clock[0] = 100.0
        bar.advance()
    assert stream.getvalue().startswith("b  100%")


def test_rich_on_a_terminal(clock, monkeypatch):
    stream = Terminal()
    with progress(4, "four[ier]", stream=stream) as bar:
        bar.advance()
        bar.update(text="n[train]=3")
        bar.update(3)
    assert "four[ier]" in stream.getvalue()
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with progress(1, "plain", stream=(plain := Terminal())) as bar:
        clock[0] = 100.0
        bar.advance()
    assert plain.getvalue() == "plain  100%  1 min 40 s\n"
