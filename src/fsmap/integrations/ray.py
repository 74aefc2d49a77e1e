"""Trials on Ray: many at once, on this machine or on a cluster; a lost worker costs its own trial.

    with RayPool() as pool:                                    # a cluster of this machine's cores
        for trial in pool.map(train_population, seeds):        # as they end
            print(trial.number, trial.value if trial.error is None else trial.error)

Results travel back to this process, which alone writes files: a trial that dies leaves nothing half
written. Every machine of a cluster needs the same fsmap, torch and Python.
"""

from __future__ import annotations

import os
import pickle
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from fsmap.errors import FsmapError, InputError, require

if TYPE_CHECKING:
    import ray
else:
    ray = require("ray", extra="ray")

LOCAL = "local"
REACH_SECONDS = 5.0
ATTEMPTS = "RAY_gcs_server_port_wait_time_s"  # read by ray.init, which tries 20 times otherwise
STORE_BYTES = 128 * 2**20  # results are rows; Ray's default is a third of the memory
OPEN_PORTS = (
    "fsmap: the Ray cluster that starts here can be reached from the network and runs what it is "
    "sent. If others share the network, close its ports with a firewall or set "
    "RAY_AUTH_MODE=token."
)


class Trial(NamedTuple):
    """How one trial ended."""

    number: int  # its place among the items
    value: Any = None
    error: BaseException | None = None  # of the last attempt
    attempts: int = 1


class RayPool:
    """A function of many items, on Ray's workers.

    Args:
        address: Of a cluster that this machine belongs to: ``"auto"`` or ``"host:6379"``. None:
            that of ``$RAY_ADDRESS``, else a cluster of this machine's cores is started here, and
            ended with the pool.
        retries: How often a trial is tried again after its worker died or it failed. An error of
            fsmap's own is not: the same input gives the same answer.
        num_cpus: Cores of one trial.
        workers: Cores of a cluster that is started here; None: all.
        say: Takes a line about the address, and about every trial that is tried again.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        retries: int = 2,
        num_cpus: float = 1,
        workers: int | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        if retries < 0:
            message = f"retries must be at least 0, got {retries}"
            raise InputError(message)
        self.address = address or os.environ.get("RAY_ADDRESS") or LOCAL
        self.retries, self.num_cpus, self.workers, self.say = retries, num_cpus, workers, say
        self._mine = False

    def __enter__(self) -> Self:
        """Connect, or start a cluster; one that this process is connected to already is used."""
        if not ray.is_initialized():
            self._connect()
            self._mine = True
        return self

    def __exit__(self, *_: object) -> None:
        """End what was begun."""
        if self._mine:
            ray.shutdown()

    def map(
        self,
        function: Callable[[Any], Any],
        items: Sequence[Any],
        *,
        num_gpus: Callable[[Any], float] = lambda _: 0,
        name: Callable[[Any], str] = str,
    ) -> Iterator[Trial]:
        """Call a function with every item, and yield trials as they end.

        Function, items and results must be picklable. ``num_gpus``, which an item needs, is ignored
        on a cluster that has none; ``name`` is what messages call an item.
        """
        gpus = ray.cluster_resources().get("GPU", 0) > 0
        remote = ray.remote(_guarded)

        def submit(item: Any) -> Any:
            needs = {"num_cpus": self.num_cpus, "num_gpus": num_gpus(item) if gpus else 0}
            return remote.options(max_retries=0, **needs).remote(function, item)

        running = {submit(item): (index, 1) for index, item in enumerate(items)}
        try:
            while running:
                (ref,), _ = ray.wait([*running], num_returns=1)
                index, attempt = running.pop(ref)
                value, error = _result(ref)
                again = error is not None and not isinstance(error, FsmapError)
                if again and attempt <= self.retries:
                    reason = f"{type(error).__name__}: {error}".splitlines()[0]
                    tries = f"attempt {attempt + 1} of {self.retries + 1}"
                    self.say(f"{name(items[index])}: {reason} Trying again, {tries}.")
                    running[submit(items[index])] = (index, attempt + 1)
                else:
                    yield Trial(index, value, error, attempt)
        finally:
            for ref in running:  # an interrupt: the cluster may live on
                with suppress(Exception):
                    ray.cancel(ref, force=True)

    def _connect(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            if self.address == LOCAL:
                self.say(OPEN_PORTS)
                settings |= {"include_dashboard": False, "object_store_memory": STORE_BYTES}
                ray.init(address=LOCAL, num_cpus=self.workers, **settings)
            else:
                self.say(f"connecting to Ray at {self.address}")
                _reach(self.address)
                with _one_attempt():
                    ray.init(address=self.address, **settings)
        except (OSError, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            message = (
                f"cannot use Ray at {self.address!r}: {reason} Give the address that `ray start "
                "--head` printed, or none to start a cluster on this machine. A cluster that asks "
                "for a token needs RAY_AUTH_MODE=token here as well."
            )
            raise InputError(message) from error


def _reach(address: str) -> None:
    """Raise at once if the port is closed: Ray itself would try for ten minutes."""
    if "://" in address:
        message = "Only HOST:PORT and auto are supported, on a machine that is part of the cluster."
        raise ValueError(message)
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
    except (OSError, OverflowError) as error:
        message = f"cannot connect to {address} ({error})."
        raise ConnectionError(message) from error


@contextmanager
def _one_attempt() -> Iterator[None]:
    """Within, Ray tries once (40 s) to connect."""
    before = os.environ.get(ATTEMPTS)
    os.environ[ATTEMPTS] = before or "1"
    try:
        yield
    finally:
        os.environ.pop(ATTEMPTS)
        if before is not None:
            os.environ[ATTEMPTS] = before


def _guarded(function: Callable[[Any], Any], item: Any) -> tuple[Any, Exception | None]:
    """On the worker: the value, or the error with the text of its traceback."""
    try:
        return function(item), None
    except Exception as error:
        text = "".join(traceback.format_exception(error)).rstrip()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return None, RuntimeError(text)
        error.add_note(f"On the worker:\n{text}")
        return None, error


def _result(ref: Any) -> tuple[Any, BaseException | None]:
    try:
        return ray.get(ref)  # type: ignore[no-any-return]
    except ray.exceptions.RayError as error:  # the worker died, or its machine
        return None, error
