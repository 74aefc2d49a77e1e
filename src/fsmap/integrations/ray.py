"""Trials on Ray: many at once, on this machine or on a cluster; a lost worker costs its own trial.

    with RayPool() as pool:                                    # a cluster of this machine's cores
        for trial in pool.map(train_population, seeds):        # as they end
            print(trial.number, trial.value if trial.error is None else trial.error)

Results travel back to this process, which alone writes files: a trial that dies leaves nothing half
written. Every machine of a cluster needs the same fsmap, torch and Python.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from fsmap.errors import InputError, require

if TYPE_CHECKING:
    import ray
else:
    ray = require("ray", extra="ray")

LOCAL = "local"
REACH_SECONDS = 5.0
RETRIES = 2  # after a worker died; a trial that raises is not repeated
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
    error: BaseException | None = None


class RayPool:
    """A function of many items, on Ray's workers.

    Args:
        address: Of a cluster that this machine belongs to: ``"auto"`` or ``"host:6379"``. None:
            that of ``$RAY_ADDRESS``, else a cluster of this machine's cores is started here, and
            ended with the pool.
        workers: Cores of a cluster that is started here; None: all.
        say: Takes a line about the address.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        workers: int | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.address = address or os.environ.get("RAY_ADDRESS") or LOCAL
        self.workers, self.say, self._mine = workers, say, False

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
    ) -> Iterator[Trial]:
        """Call a function with every item, and yield trials as they end.

        Function, items and results must be picklable. A trial whose worker dies is tried again,
        twice. ``num_gpus``, which an item needs, is ignored on a cluster that has none.
        """
        gpus = ray.cluster_resources().get("GPU", 0) > 0
        remote = ray.remote(function)
        running = {}
        for number, item in enumerate(items):
            needs = {"num_cpus": 1, "num_gpus": num_gpus(item) if gpus else 0}
            running[remote.options(max_retries=RETRIES, **needs).remote(item)] = number
        try:
            while running:
                (ref,), _ = ray.wait([*running], num_returns=1)
                yield Trial(running.pop(ref), *_result(ref))
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
                # one attempt (40 s) to connect; Ray makes 20
                os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")
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


def _result(ref: Any) -> tuple[Any, BaseException | None]:
    try:
        return ray.get(ref), None
    except ray.exceptions.RayTaskError as error:  # the function raised
        error.cause.add_note(f"On the worker:\n{error}")
        return None, error.cause
    except ray.exceptions.RayError as error:  # the worker died, or its machine
        return None, error
