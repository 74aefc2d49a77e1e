"""The step compiled, and captured whole in a CUDA graph; :class:`Step` is the definition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fsmap.errors import InputError
from fsmap.functional.noise import is_random
from fsmap.train.images.feed import Feeder
from fsmap.train.images.parallel import Group
from fsmap.train.images.settings import ImageSettings
from fsmap.train.images.step import GradientOfInputs, Step
from fsmap.train.images.traced import traced

WARMUP_STEPS = 3  # torch's recommendation: lazy initialization must be over before the capture


def make_step(
    module: nn.Module,
    settings: ImageSettings,
    feeder: Feeder,
    group: Group,
    *,
    by_name: bool = False,
) -> Step:
    """The step that the settings ask for.

    Args:
        module: On its device.
        settings: Of the run.
        feeder: Gives the images.
        group: The processes that share the work.
        by_name: Whether the module was made from the settings: then all that are made from equal
            settings share one trace.

    Returns:
        An eager step, a traced one, or a captured one (of a single process on CUDA).

    Raises:
        InputError: If it cannot be had for this module or device.
    """
    cuda = feeder.device.type == "cuda"
    if settings.graph and not cuda:
        message = f"graph=True needs a CUDA device, got {feeder.device}"
        raise InputError(message)
    if not (settings.graph or settings.compile):
        return Step(module, settings, feeder, group)
    noisy = [type(m).__name__ for m in module.modules() if is_random(m)]
    if noisy:
        message = (
            f"compile and graph need a model without random layers, and this one has "
            f"{', '.join(sorted(set(noisy)))}. Set both to False, or the drop rates to 0."
        )
        raise InputError(message)
    fixed = [name for name, p in module.named_parameters() if not p.requires_grad]
    if fixed:
        message = (
            f"compile and graph need a model all of whose parameters are trained, and "
            f"{fixed[0]!r} has requires_grad=False. Set both to False."
        )
        raise InputError(message)
    kind = CapturedStep if settings.graph and group.size == 1 else TracedStep
    step = kind(module, settings, feeder, group)
    step.by_name = by_name
    return step


class TracedStep(Step):
    """A step whose gradient is traced, and compiled where that is wanted."""

    by_name = False

    def make(self, kind: str) -> GradientOfInputs:
        """One kind of step, traced."""
        s = self.settings
        options = (s.estimator, s.beta, s.batchnorm, s.every, s.label_smoothing, s.sam)
        data = (self.feeder.task.normalize, self.feeder.task.augment, tuple(self.feeder.widths))
        how = (kind, str(self.half), s.deterministic, s.precision, s.channels_last)
        model = (s.model, s.width, repr(self.module))
        key = (*model, *data, *self._mixture(), *how, *options) if self.by_name else None
        return traced(
            super().make(kind),
            self.params,
            self.buffers,
            self.feeder.inputs(kind),
            compiled=s.compile,
            key=key,
        )

    def _mixture(self) -> tuple[object, ...]:
        """What of p_X decides the operations."""
        px = self.feeder.task.px
        return () if px is None else tuple(s.augmented for s in px.sources)


class CapturedStep(TracedStep):
    """A step that is captured once for each kind and replayed."""

    def __init__(
        self, module: nn.Module, settings: ImageSettings, feeder: Feeder, group: Group
    ) -> None:
        """See :class:`Step`."""
        super().__init__(module, settings, feeder, group)
        self.graphs: dict[str, Any] = {}

    def advance(self, kind: str) -> None:
        """Replay the step, after capturing it at its first use."""
        if kind not in self.graphs:
            self.graphs[kind] = self._capture(kind)
        self.graphs[kind].replay()

    def _capture(self, kind: str) -> Any:
        before = [t.clone() for t in self.state()]
        stream = torch.cuda.Stream(self.feeder.device)
        stream.wait_stream(torch.cuda.current_stream(self.feeder.device))
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_STEPS):
                super().advance(kind)
        torch.cuda.current_stream(self.feeder.device).wait_stream(stream)
        with torch.no_grad():
            for t, old in zip(self.state(), before, strict=True):
                t.copy_(old)
        graph = torch.cuda.CUDAGraph()
        # A priority above that of the stream that draws ψ: drawing fills what a step leaves idle.
        first = torch.cuda.Stream(self.feeder.device, priority=-1)
        with torch.cuda.graph(graph, stream=first):
            super().advance(kind)
        return graph

    def state(self) -> list[Tensor]:
        """Every tensor that a step changes."""
        momenta = [self.optimizer.state[p].get("momentum_buffer") for p in self.params.values()]
        return [
            *(p.detach() for p in self.params.values()),
            *self.buffers.values(),
            *(m for m in momenta if m is not None),
            *(self.feeder.scale, self.steady, self.found_inf, self.totals),
        ]
