"""Milliseconds and memory of a training step in loops as users write them.

    python -m benchmarks.loops                    small networks on the CPU
    python -m benchmarks.loops --device cuda      ResNet-18, GPT-2 small and ViT-S in bf16 autocast

Every way trains the same network on batches that are on the device already. ``by hand`` is the
loop without fsmap: one pure loss with ``torch.func.jvp``, compiled as a whole. Modes: ``eager``,
``compiled`` (``torch.compile``), ``reduce-overhead``, and ``captured``: compiled, and the step as a
whole, optimizer included, in one CUDA graph by ``fsmap.train.capture``. Ways are timed in turns,
round after round; a row has the median over rounds and the ratio to the plain loop of the
same run. Memory is right only if a process runs one loop: give one ``--way`` and one ``--mode``.
GB counts the memory that CUDA graphs keep between steps; ``allocated_bytes`` of a row is torch's
``max_memory_allocated`` over two steps, which does not.
Rows are appended to ``benchmarks/results/loops.jsonl``.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import fsmap
from fsmap.files import circumstances
from fsmap.linalg.jacobian import SecondOrder
from fsmap.lmap.core import Drawn
from fsmap.models.resnet import resnet18
from fsmap.train.capture import CapturedStep

RESULTS = Path(__file__).parent / "results"
LAM = 1e-6
Step = Callable[[], Any]


class Task(NamedTuple):
    """A network and its data."""

    make: Callable[[], nn.Module]
    x: Tensor  # [pool, ...]
    y: Tensor
    batch: int
    points: int
    ways: tuple[str, ...]
    call: Callable[[nn.Module, Tensor], Tensor] | None = None


def images(device: str, size: int, batch: int, pool: int = 4096) -> tuple[Tensor, Tensor]:
    x = torch.randn(pool, 3, size, size, device=device)
    return x.to(memory_format=torch.channels_last), torch.randint(0, 10, (pool,), device=device)


def resnet(device: str, points: int, ways: tuple[str, ...]) -> Task:
    def make() -> nn.Module:
        return resnet18().to(device, memory_format=torch.channels_last)

    return Task(make, *images(device, 32, 128), 128, points, ways)


def vit(device: str) -> Task:
    from torchvision.models.vision_transformer import VisionTransformer

    def make() -> nn.Module:
        return VisionTransformer(224, 16, 12, 6, 384, 1536, num_classes=1000).to(device)

    x = torch.randn(256, 3, 224, 224, device=device)
    ways = ("plain", "sam", "by hand", "lmap frozen", "lmap frozen every 2")
    return Task(make, x, torch.randint(0, 1000, (256,), device=device), 64, 16, ways)


def gpt2(device: str) -> Task:
    from transformers import GPT2Config, GPT2LMHeadModel

    def make() -> nn.Module:
        config = GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False)
        return GPT2LMHeadModel(config).to(device)

    tokens = torch.randint(0, 50257, (256, 512), device=device)
    ways = ("plain", "sam", "by hand", "lmap frozen", "lmap frozen every 2")
    return Task(make, tokens, tokens, 16, 4, ways, lambda m, x: m(x, use_cache=False).logits)


def mlp(device: str) -> Task:
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Linear(20, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10)
        )

    x, y = torch.randn(4096, 20), torch.randint(0, 10, (4096,))
    return Task(make, x, y, 128, 128, ("plain", "by hand", "lmap joint"))


def cnn(device: str) -> Task:
    def make() -> nn.Module:
        return resnet18(width=8)

    x, y = torch.randn(256, 3, 16, 16), torch.randint(0, 10, (256,))
    return Task(make, x, y, 32, 32, ("plain", "by hand", "lmap joint"))


def transformer(device: str) -> Task:
    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        return nn.Sequential(
            nn.Linear(8, 64), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            nn.Flatten(), nn.Linear(64 * 16, 10),
        )  # fmt: skip

    x, y = torch.randn(512, 16, 8), torch.randint(0, 10, (512,))
    return Task(make, x, y, 32, 32, ("plain", "by hand", "lmap joint"))


CPU_TASKS: dict[str, Callable[[], Task]] = {
    "mlp": lambda: mlp("cpu"),
    "cnn": lambda: cnn("cpu"),
    "transformer": lambda: transformer("cpu"),
}
JOINT = ("plain", "sam", "by hand", "lmap joint")
CUDA_TASKS: dict[str, Callable[[], Task]] = {
    "resnet18": lambda: resnet("cuda", 128, (*JOINT, "lmap frozen", "penalty")),
    "resnet18 S=32": lambda: resnet(
        "cuda",
        32,
        (
            "plain",
            "sam",
            *(f"lmap {m}" for m in ("joint", "joint every 2", "frozen", "frozen every 2", "batch")),
        ),
    ),
    "gpt2": lambda: gpt2("cuda"),
    "vit-s": lambda: vit("cuda"),
}


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    if out.ndim == 3:  # next token
        return F.cross_entropy(out[:, :-1].flatten(0, 1).float(), y[:, 1:].flatten())
    return F.cross_entropy(out.float(), y)


class Loop:
    """One way to train a task: ``loop()`` takes a step."""

    def __init__(self, task: Task, way: str, mode: str, device: str) -> None:
        torch.manual_seed(0)
        self.task, self.device = task, device
        self.model = task.make().train()
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=1e-4, momentum=0.9, fused=device == "cuda"
        )
        for p in self.model.parameters():  # what the first step makes
            self.optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        self.call = task.call or (lambda m, x: m(x))
        self.eager, self.captured = mode == "eager", mode == "captured"
        self.compile = {"mode": mode} if mode == "reduce-overhead" else {}
        self.place = 0
        self.loss = loss_of if self.eager else torch.compile(loss_of)
        self.lm: fsmap.LMAP | None = None
        self.graphs: dict[bool, CapturedStep] = {}
        kind, *options = way.split(" ")
        self.step = getattr(self, f"make_{kind}")(" ".join(options))

    def __call__(self) -> None:
        size = self.task.batch
        start = self.place % (len(self.task.x) // size) * size
        x, y = self.task.x[start : start + size], self.task.y[start : start + size]
        if self.captured:
            self.replay(x, y)
        else:
            self.update(x, y)
        self.place += 1

    def update(self, *args: Any) -> None:
        self.optimizer.zero_grad()
        self.step(*args)
        self.optimizer.step()

    def replay(self, x: Tensor, y: Tensor) -> None:
        """A step by a CUDA graph: fill its inputs, then replay."""
        inputs: list[Tensor] = [x, y]
        active = True
        if self.lm is not None:
            self.lm.step = self.place
            active = self.lm.regularizer.active
            with self.autocast():
                drawn = self.lm.draw(x)
            inputs += [t for t in (drawn.points, drawn.probes) if isinstance(t, Tensor)]
        else:
            inputs += self.extra()
        if active not in self.graphs:
            fixed = [t.clone() for t in inputs]
            self.graphs[active] = CapturedStep(lambda: self.update(*fixed), self.state)
            self.fixed = {**getattr(self, "fixed", {}), active: fixed}
        torch._foreach_copy_(self.fixed[active], inputs)
        self.graphs[active]()

    def extra(self) -> list[Tensor]:
        """Inputs of a step besides the batch."""
        return []

    def state(self) -> list[Tensor]:
        momenta = [s["momentum_buffer"] for s in self.optimizer.state.values()]
        return [*self.model.parameters(), *self.model.buffers(), *momenta]

    def autocast(self) -> AbstractContextManager[Any]:
        half = self.device == "cuda"
        return torch.autocast("cuda", torch.bfloat16) if half else nullcontext()

    def compiled(self, function: Any) -> Any:
        return function if self.eager else torch.compile(function, **self.compile)

    def make_plain(self, _: str) -> Any:
        model = self.compiled(self.model)

        def step(x: Tensor, y: Tensor) -> None:
            with self.autocast():
                loss = self.loss(self.call(model, x), y)
            loss.backward()

        return step

    def make_sam(self, _: str) -> Any:
        plain, params = self.make_plain(""), list(self.model.parameters())

        def step(x: Tensor, y: Tensor) -> None:
            plain(x, y)
            with torch.no_grad():
                grads = [p.grad for p in params]
                norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
                moves = torch._foreach_mul(grads, 0.05 / (norm + 1e-12))
                torch._foreach_add_(params, moves)
            self.optimizer.zero_grad()
            plain(x, y)
            with torch.no_grad():
                torch._foreach_sub_(params, moves)

        return step

    def make_by(self, _: str) -> Any:
        """One pure loss; ``joint`` if the network has BatchNorm."""
        model, points = self.model, self.task.points
        names = [n for n, _ in model.named_parameters()]
        joint = "lmap joint" in self.task.ways

        class Call(nn.Module):
            def __init__(inner) -> None:
                super().__init__()
                inner.m = model

            def forward(inner, x: Tensor) -> Tensor:
                return self.call(inner.m, x)

        call = Call()

        def pure(params: dict[str, Tensor], x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            buffers = {n: b.clone() for n, b in model.named_buffers()}
            with SecondOrder():
                own = {f"m.{n}": t for n, t in {**params, **buffers}.items()}
                return functional_call(call, own, (x,)), buffers

        def objective(x: Tensor, y: Tensor, z: Tensor, psi: dict[str, Tensor]) -> Any:
            params = dict(model.named_parameters())
            if joint:
                both = torch.cat([x, z])
                out, tangent, buffers = torch.func.jvp(
                    lambda p: pure(p, both), (params,), (psi,), has_aux=True
                )
                out = out[: len(x)]
            else:
                out, buffers = self.call(model, x), {}
                both = z
                _, tangent, _ = torch.func.jvp(
                    lambda p: pure(p, z), (params,), (psi,), has_aux=True
                )
            R = tangent.float().square().sum() / len(both)
            return loss_of(out, y) + LAM * R, buffers

        compiled = self.compiled(objective)

        def draw() -> list[Tensor]:
            start = int(torch.randint(0, len(self.task.x) - points, ()))
            return [self.task.x[start : start + points], *map(torch.randn_like, model.parameters())]

        self.extra = draw  # type: ignore[method-assign]

        def step(x: Tensor, y: Tensor, *drawn: Tensor) -> None:
            z, *psi = drawn or draw()
            with self.autocast():
                loss, buffers = compiled(x, y, z, dict(zip(names, psi, strict=True)))
            own = dict(model.named_buffers())
            for name, new in buffers.items():
                own[name].copy_(new)
            loss.backward()

        return step

    def make_lmap(self, options: str) -> Any:
        mode, _, every = options.partition(" every ")
        forward = self.task.call
        lm = fsmap.LMAP(
            self.model, self.task.x, num_points=self.task.points, batchnorm=mode,
            every=int(every or 1), forward=forward,
        )  # fmt: skip
        if not self.eager:
            lm.compile(**self.compile)
        self.lm = lm

        def step(x: Tensor, y: Tensor, *drawn: Tensor) -> None:
            with self.autocast():
                out, R = lm(x, drawn=Drawn(*drawn, *[None] * (2 - len(drawn))) if drawn else None)
                loss = self.loss(out, y) + LAM * R
            loss.backward()

        return step

    def make_penalty(self, _: str) -> Any:
        penalty = fsmap.LaplacianPenalty(
            self.model, self.task.x, num_points=self.task.points, forward=self.task.call
        )
        if not self.eager:
            penalty.compile(**self.compile)
        plain = self.compiled(self.model)

        def step(x: Tensor, y: Tensor) -> None:
            with self.autocast():
                loss = self.loss(self.call(plain, x), y) + LAM * penalty()
            loss.backward()

        return step


@contextmanager
def exclusively(lock: Path | None) -> Iterator[None]:
    """Hold a lock file, so that processes that compile side by side are timed one by one."""
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--task", nargs="*", help="names of tasks; default: all of the device")
    parser.add_argument("--way", nargs="*", help="only these ways, such as 'lmap joint'")
    parser.add_argument("--mode", nargs="*", help="eager, compiled, reduce-overhead, captured")
    parser.add_argument("--steps", type=int, default=20, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--lock", type=Path, help="file to lock while timing, for several processes"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "loops.jsonl")
    options = parser.parse_args()
    tasks = CUDA_TASKS if options.device == "cuda" else CPU_TASKS
    modes = options.mode or (
        ["eager"] if options.device == "cpu" else ["eager", "reduce-overhead", "captured"]
    )
    about = circumstances(options.device)
    torch.backends.cudnn.benchmark = True
    for name in options.task or tasks:
        task = tasks[name]()
        ways = [way for way in task.ways if not options.way or way in options.way]
        measure(name, task, ways, modes, options, about)


def measure(
    name: str, task: Task, ways: list[str], modes: list[str], options: Any, about: dict[str, Any]
) -> None:
    """Time the ways of one task in turns, print a table and append rows."""
    device, loops, first, peaks, allocated, failed = options.device, {}, {}, {}, {}, {}
    for way in ways:
        for mode in modes:
            if (way, mode) == ("penalty", "captured"):
                continue  # a penalty draws inside its call
            key = (way, mode)
            try:
                if device == "cuda":
                    torch.cuda.empty_cache()
                    empty = torch.cuda.memory_reserved()
                start = now(device)
                loop = Loop(task, way, mode, device)
                for _ in range(4):
                    loop()
                first[key] = now(device) - start
                if device == "cuda":  # what stays, graphs included, and what a step adds to it
                    torch.cuda.empty_cache()
                    kept = torch.cuda.memory_reserved() - empty
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                    loop(), loop()
                    now(device)
                    peaks[key] = kept + torch.cuda.max_memory_allocated() - before
                    allocated[key] = torch.cuda.max_memory_allocated()
                loops[key] = loop
            except Exception as error:  # the row says so, other ways go on
                failed[key] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    times: dict[tuple[str, str], list[float]] = {key: [] for key in loops}
    with exclusively(options.lock):
        for _ in range(options.rounds):
            for key, loop in loops.items():
                steps = options.steps + options.steps % 2
                start = now(device)
                for _ in range(steps):
                    loop()
                times[key].append(1e3 * (now(device) - start) / steps)
    medians = {key: statistics.median(found) for key, found in times.items()}
    plain = min((t for (way, _), t in medians.items() if way == "plain"), default=float("nan"))
    hand = min((t for (way, _), t in medians.items() if way == "by hand"), default=float("nan"))
    print(f"\n{name}: B = {task.batch}, S = {task.points}, {device}")
    print(f"{'way':<22}{'mode':<17}{'ms':>8}{'spread':>8}{'x plain':>9}{'x hand':>8}"
          f"{'GB':>7}{'first 4, s':>12}")  # fmt: skip
    for key, ms in medians.items():
        spread = (max(times[key]) - min(times[key])) / ms
        row = {
            "task": name, "way": key[0], "mode": key[1], "device": device, "B": task.batch,
            "S": task.points, "ms": ms, "spread": spread, "ratio_plain": ms / plain,
            "ratio_hand": ms / hand, "peak_bytes": peaks.get(key),
            "allocated_bytes": allocated.get(key), "first_seconds": first[key],
            **about,
        }  # fmt: skip
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        gb = f"{peaks[key] / 1e9:.2f}" if key in peaks else ""
        print(f"{key[0]:<22}{key[1]:<17}{ms:>8.2f}{spread:>8.0%}{ms / plain:>9.2f}"
              f"{ms / hand:>8.2f}{gb:>7}{first[key]:>12.1f}", flush=True)  # fmt: skip
    for key, why in failed.items():
        print(f"{key[0]:<22}{key[1]:<17} failed: {why}", flush=True)


if __name__ == "__main__":
    main()
