"""What an experiment hands to the page for a slider: frames, each a set of curves or a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Curve(NamedTuple):
    """One line (or set of points) of a frame, drawn by the page with hover values.

    Attributes:
        name: What the legend says.
        x: Abscissae.
        y: Ordinates, as many.
        method: ``"ps-map"``, ``"fs-map"``, ``"l-map"`` for that method's color; None for ink.
        style: ``"line"``, ``"dashed"`` or ``"points"``.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    method: str | None = None
    style: str = "line"


class Frame(NamedTuple):
    """What is seen at one position of the slider: curves, or a matplotlib figure.

    Attributes:
        label: What the slider says there, such as ``"ε = 0.01"``.
        curves: Lines on axes shared by all frames.
        figure: A matplotlib figure in place of curves (for images and contours).
        note: One line below, such as the distances at this position.
    """

    label: str
    curves: Sequence[Curve] = ()
    figure: Figure | None = None
    note: str = ""


class Interactive(NamedTuple):
    """A slider and its frames.

    Attributes:
        title: What is moved and what to watch.
        parameter: Name of what the slider moves, such as ``"ε"``.
        frames: In the order of the slider.
        xlabel: Label of the horizontal axis (curves only).
        ylabel: Label of the vertical axis (curves only).
        start: Index of the frame that is shown first.
    """

    title: str
    parameter: str
    frames: Sequence[Frame]
    xlabel: str = ""
    ylabel: str = ""
    start: int = 0

    def describe(self) -> dict[str, Any]:
        """Everything but the figures, ready for JSON.

        Returns:
            Title, parameter, labels, start, and the frames with their curves.
        """
        frames = [
            {"label": f.label, "note": f.note, "curves": [c._asdict() for c in f.curves]}
            for f in self.frames
        ]
        return {**self._asdict(), "frames": frames}
