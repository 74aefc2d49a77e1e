"""``--ray``: measure units on a cluster."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fsmap.cli import console
from fsmap.errors import InputError

if TYPE_CHECKING:
    from fsmap.paper.engine import Pool


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--ray`` and ``--retries``.

    Args:
        parser: Where to.
    """
    parser.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="measure all units at once on a Ray cluster (HOST:6379, or auto: this machine's); "
        "without an address one is started on this machine",
    )
    parser.add_argument(
        "--retries",
        type=int,
        default=2,
        metavar="N",
        help="with --ray: try a unit again after its worker died or it failed (default: 2)",
    )


@contextmanager
def pool_of(arguments: argparse.Namespace) -> Iterator[Pool | None]:
    """The pool that was asked for.

    Args:
        arguments: With ``ray`` and ``retries``.

    Yields:
        The pool; None without ``--ray``.

    Raises:
        InputError: If there is nothing that ``--retries`` could mean.
    """
    if arguments.ray is None:
        if arguments.retries != 2:
            message = "--retries goes with --ray: here, a unit that fails is a bug to look at."
            raise InputError(message)
        yield None
        return
    from fsmap.integrations.ray import RayPool

    with RayPool(arguments.ray or None, retries=arguments.retries, say=console.note) as pool:
        yield pool
