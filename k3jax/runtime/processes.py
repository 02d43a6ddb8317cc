"""What the processes of one JAX program tell each other while they trace it.

The road is the key-value store that `jax.distributed` keeps for its own start-up: no device takes
part, waiting has a limit, and errors are Python exceptions on every process. All processes run the
same program, so they come to the same exchanges in the same order.
"""

import collections
import functools
from collections.abc import Callable, Collection
from pathlib import Path

import jax
from jax._src import distributed  # the store has no public name

TIMEOUT_SECONDS = 120
"""How long to wait for another process, which may still be compiling or reading a checkpoint."""

_exchanges: collections.Counter[str] = collections.Counter()
_agreed: set[tuple[str, frozenset[int], str]] = set()


@functools.cache
def host_id() -> str:
    """Tells this machine from others: processes with the same one can share memory."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def gather(name: str, processes: Collection[int], value: str) -> dict[int, str]:
    """Every process's value, once all have called this as often under this name.

    Args:
        name: of the exchange.
        processes: who takes part, this process among them; alone it does not wait.
        value: of this process.

    Raises:
        RuntimeError: a process did not come.
    """
    own = jax.process_index()
    others = sorted(set(processes) - {own})
    if not others:
        return {own: value}
    client = distributed.global_state.client
    if client is None:
        raise NotImplementedError(
            f"{name}: processes {[own, *others]} have no key-value store to exchange values; "
            "start them with jax.distributed.initialize"
        )
    prefix = f"k3jax/{name}/{_exchanges[name]}"
    client.key_value_set(f"{prefix}/{own}", value, allow_overwrite=True)
    values = {own: value}
    for process in others:
        try:
            values[process] = client.blocking_key_value_get(
                f"{prefix}/{process}", int(TIMEOUT_SECONDS * 1000)
            )
        except jax.errors.JaxRuntimeError as error:
            raise RuntimeError(
                f"{name}: process {process} did not come within {TIMEOUT_SECONDS:g} s. All "
                "processes must run the same program, with the same tier for the same layers "
                f"({error})"
            ) from error
    _exchanges[name] += 1
    return dict(sorted(values.items()))


def agree(name: str, processes: Collection[int], value: str) -> None:
    """Compares a value over processes, once for each value.

    Raises:
        ValueError: another process has another value.
        RuntimeError: a process did not come.
    """
    key = (name, frozenset(processes), value)
    if key in _agreed:
        return
    for process, other in gather(name, processes, value).items():
        if other != value:
            raise ValueError(
                f"{name}: process {jax.process_index()} has {value}; process {process} has "
                f"{other}. All processes must run the same program on arrays of the same shapes"
            )
    _agreed.add(key)


def gather_results(
    name: str, processes: Collection[int], action: Callable[[], str]
) -> dict[int, str]:
    """What `action` returned on every process; where it raised on one, this raises on all.

    Raises:
        RuntimeError: it raised on another process; here its own exception goes on.
    """
    failure = None
    try:
        answer = "+" + action()
    except Exception as error:
        failure, answer = error, f"-{error}"
    answers = gather(name, processes, answer)
    if failure is not None:
        raise failure
    for process, text in answers.items():
        if text.startswith("-"):
            raise RuntimeError(f"{name}: process {process} could not: {text[1:]}")
    return {process: text[1:] for process, text in answers.items()}
