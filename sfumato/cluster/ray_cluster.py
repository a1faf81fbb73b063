"""Workers on a Ray cluster: one actor for each core or GPU, restarted when it dies (trusted to pass messages only).

Shard n belongs to worker n modulo their number, so that its pixels stay where they were decoded. A worker that was
killed is started again, reads its shards again and checks their hashes; the calls that it had not answered are
repeated. Ray's own messages are not shown. A local cluster keeps its objects in shared memory, writes none to disk, and
requires a random token of whoever connects to its ports. A Ray that other code has started is not used.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import secrets
import shutil
import socket
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sfumato.cluster.graph_pickling import pack, versions
from sfumato.cluster.worker import (
    Entry,
    Failure,
    Loaded,
    Partial,
    ShardError,
    Step,
    Task,
    Worker,
    WorkersDied,
    code_digest,
)
from sfumato.data.errors import DataError, DataWarning, reason
from sfumato.threads import usable_cores

RETRIES = 8  # of a call that ended its worker; workers are started again without limit
PENDING_CALLS = 2  # calls of `compute` that wait for each worker: their arguments are in the object store
STARTUP_TIMEOUT = 300  # seconds until all workers run: they import PyTorch, and a cluster may have to start machines
STDOUT, STDERR = 1, 2
CONNECTING = 20  # seconds until a cluster must have answered
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "1",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".*",  # print nothing of workers, nor about workers that died
    "RAY_record_task_actor_creation_sites": "false",
    "RAY_task_events_report_interval_ms": "0",  # nothing about tasks is kept for dashboards
}
SYSTEM = {  # of a local cluster
    "automatic_object_spilling_enabled": False,
    "local_fs_capacity_threshold": 0.0,  # a full store does not overflow to disk either
    "worker_niceness": 0,  # as the driver: with Ray's default of 15, workers starve beside another program
}
STORE_BYTES = 256 << 20  # object store of a local cluster: queries and sums, no images from files
SHARED_MEMORY = Path("/dev/shm")
TOKEN = secrets.token_hex(32)  # of local clusters that this process starts
_started: set[str] = set()  # address of the Ray that this process has started or joined here


class RayCluster:
    """Workers on a Ray cluster.

    - address: "local" starts one on this machine; else "ray://host:10001", "auto" or "host:6379".
    - workers: number of workers, default: the GPUs of the cluster, or else its cores.
    - store: bytes of the object store of a local cluster, default 256 MiB.
    """

    def __init__(self, address: str = "local", workers: int | None = None, store: int = STORE_BYTES) -> None:
        self._ray = _import_ray(address)
        self._entries: dict[tuple[str, int], Any] = {}
        self._packed: dict[int, tuple[Any, list[Tensor], list[int], bytes]] = {}
        self._steps: dict[str, bytes] = {}
        self._started = not self._ray.is_initialized()
        if self._started:
            self._start(address, store)
        elif address not in _started:
            what = f"Ray is already initialised in this process, not by sfumato for {address!r}"
            raise DataError(f"{what}: private images could travel to other machines. Call ray.shutdown() first")
        resources = self._ray.cluster_resources()
        gpus, cpus = int(resources.get("GPU", 0)), max(1, int(resources.get("CPU", 1)))
        number = workers or gpus or cpus
        self.threads = max(1, cpus // number)  # of a worker that decodes
        kind = self._ray.remote(_Actor).options(
            num_cpus=0 if address == "local" else min(self.threads, cpus / number),  # local: as many as were asked for
            num_gpus=gpus / number if gpus else 0,
            max_restarts=-1,
            max_task_retries=RETRIES,
        )
        self._actors = [kind.remote(code_digest()) for _ in range(number)]
        ready, _ = self._ray.wait(
            [actor.pid.remote() for actor in self._actors], num_returns=number, timeout=STARTUP_TIMEOUT
        )
        if len(ready) < number:
            self.close()
            raise DataError(f"the cluster {address} has no room for {number} workers; pass fewer (--workers)")

    @property
    def number(self) -> int:
        return len(self._actors)

    def pids(self) -> list[int]:
        """Return the process of each worker."""
        found: list[int] = self._ray.get([actor.pid.remote() for actor in self._actors])
        return found

    def hold(self, entries: Sequence[Entry]) -> None:
        with _translate_ray_errors():
            for entry in entries:
                self._reference(entry)

    def load(self, entries: Sequence[Entry]) -> Iterator[Loaded | Failure]:
        return self._each(entries, lambda actor, entry: actor.load.remote(entry))

    def total(self, task: Task, entries: Sequence[Entry]) -> Iterator[Partial | Failure]:
        sent = replace(
            task,
            query=replace(task.query, run=self._pack(task.query.run)),
            shared=[each.cpu() for each in task.shared],
            steps=self._pack_steps(task.steps),
        )
        with _translate_ray_errors():
            common = self._ray.put(sent)
        return self._each(entries, lambda actor, entry: actor.total.remote(common, entry))

    def map(self, steps: Sequence[Step], device: str, entries: Sequence[Entry]) -> Iterator[Partial | Failure]:
        with _translate_ray_errors():
            common = self._ray.put(self._pack_steps(steps))
        return self._each(entries, lambda actor, entry: actor.map.remote(common, device, entry))

    def matches(self, digests: frozenset[bytes], entries: Sequence[Entry]) -> Iterator[frozenset[bytes] | Failure]:
        return self._each(entries, lambda actor, entry: actor.matches.remote(digests, entry))

    def compute(self, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        with _translate_ray_errors(withheld=False):
            packed = self._ray.put(pack(function)[0])
        waiting: deque[Any] = deque()
        for following in range(len(calls) + PENDING_CALLS * self.number):
            with _translate_ray_errors(withheld=False):
                if following < len(calls):
                    actor = self._actors[following % self.number]
                    waiting.append(actor.compute.remote(packed, *calls[following]))
                if following < PENDING_CALLS * self.number or not waiting:
                    continue
                result = self._ray.get(waiting.popleft())
            yield result

    def share(self, value: Any) -> Any:
        with _translate_ray_errors(withheld=False):
            return self._ray.put(value)

    def forget(self, owner: str) -> None:
        self._entries = {key: value for key, value in self._entries.items() if key[0] != owner}
        with contextlib.suppress(self._ray.exceptions.RayError):  # a worker that died holds nothing
            self._ray.get([actor.forget.remote(owner) for actor in self._actors])

    def close(self) -> None:
        """Stop the workers; their pixels and sums are gone with them. Stop a cluster that this object started."""
        for actor in self._actors:
            with contextlib.suppress(Exception):
                self._ray.kill(actor, no_restart=True)
        self._entries.clear()
        self._packed.clear()
        self._steps.clear()
        if self._started and self._ray.is_initialized():
            self._ray.shutdown()
            _started.clear()

    def _start(self, address: str, store: int) -> None:
        logging.getLogger("ray").setLevel(logging.CRITICAL)
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
        if address == "local":
            check_shared_memory(store)
            options |= {
                "address": "local",
                "num_cpus": usable_cores(),
                "include_dashboard": False,
                "object_store_memory": store,
                "_system_config": SYSTEM,
            }
        else:
            options["address"] = address
            warn_about_security(address)
        try:
            check_reachable(address)
            with warnings.catch_warnings(action="ignore"), _silence():
                self._ray.init(**options)
            _started.add(address)
        except Exception as error:
            raise DataError(f"the cluster {address} cannot be reached or started: {reason(error)}") from None

    def _each(self, entries: Sequence[Entry], call: Callable[[Any, Any], Any]) -> Iterator[Any]:
        """Call a worker for each entry and yield the results as they come."""
        with _translate_ray_errors():
            waiting = [call(self._actors[e.number % len(self._actors)], self._reference(e)) for e in entries]
        while waiting:
            with _translate_ray_errors():
                ready, waiting = self._ray.wait(waiting, num_returns=1, timeout=1.0)
                results = self._ray.get(ready)
            yield from results

    def _reference(self, entry: Entry) -> Any:
        """Return the entry in the object store, where it is put once."""
        key = entry.owner, entry.number
        if key not in self._entries or self._entries[key][0] is not entry:
            self._entries.pop(key, None)  # first, so that the store never holds the images twice
            self._entries[key] = entry, self._ray.put(entry)
        return self._entries[key][1]

    def _pack(self, function: Any) -> Any:
        """Return a pickled function or graph; the same object is pickled once, until one of its tensors changes."""
        known = self._packed.get(id(function))
        if known is None or known[0] is not function or known[2] != versions(known[1]):
            if len(self._packed) > 16:
                self._packed.clear()
            packed, tensors = pack(function)
            known = self._packed[id(function)] = function, tensors, versions(tensors), packed
        return known[3]

    def _pack_steps(self, steps: Sequence[Step]) -> tuple[Step, ...]:
        """Return maps with pickled graphs, as they were when they were first applied: a restart repeats them."""
        for step in steps:
            if step.identity not in self._steps:
                self._steps[step.identity] = pack(step.graph)[0]
        return tuple(replace(step, graph=self._steps[step.identity]) for step in steps)


class _Actor(Worker):
    """A worker as an actor: graphs arrive pickled. It computes in one thread, so that the number of workers, which
    share the cores of a machine, changes no rounding. It prints nothing: that would be in Ray's log files, and
    libraries of image formats print what is wrong with a file. It asks for no core dump.
    """

    def __init__(self, code: str) -> None:
        super().__init__(code)
        torch.set_num_threads(1)
        _print_nothing()
        forbid_core_dumps()

    def pid(self) -> int:
        return os.getpid()

    def compute(self, function: bytes, *arguments: Any) -> Any:
        self.check_code()
        return self.unpack(function)(*arguments)

    def total(self, task: Task, entry: Entry) -> Partial | Failure:
        query = replace(task.query, run=self.unpack(task.query.run))  # type: ignore[arg-type]
        return super().total(replace(task, query=query, steps=self._unpack_steps(task.steps)), entry)

    def map(self, task: Sequence[Step], device: str, entry: Entry) -> Partial | Failure:
        return super().map(self._unpack_steps(task), device, entry)

    def _unpack_steps(self, steps: Sequence[Step]) -> tuple[Step, ...]:
        return tuple(replace(step, graph=self.unpack(step.graph)) for step in steps)


def check_shared_memory(store: int) -> None:
    """Raise if the object store does not fit into shared memory: Ray would silently put it on disk."""
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.exists() else None
    if free is not None and free < store:
        what = f"{SHARED_MEMORY} has {free >> 20} MiB free, and a local cluster needs {store >> 20} MiB"
        raise DataError(f"{what}: Ray would write exact sums to disk. In a container, pass --shm-size=1g to docker run")


def check_reachable(address: str) -> None:
    """Raise `OSError` unless something listens at the address: Ray would try for minutes, and print each attempt."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECTING).close()


def warn_about_security(address: str) -> None:
    """Warn where private sums would travel without encryption or authentication."""
    tls, token = os.environ.get("RAY_USE_TLS", "0") == "1", os.environ.get("RAY_AUTH_MODE", "") == "token"
    token = token and os.environ.get("RAY_AUTH_TOKEN") != TOKEN  # that one is of local clusters
    if not tls or not token:
        missing = " and ".join(["TLS (RAY_USE_TLS=1)"] * (not tls) + ["a token (RAY_AUTH_MODE=token)"] * (not token))
        what = f"the cluster {address} is used without {missing}: whoever reaches its network can read private images"
        warnings.warn(DataWarning(f"{what}. See docs/cluster.md"), stacklevel=5)


def forbid_core_dumps() -> None:
    """Set the limit on the size of this process's core dumps to 0. The hard limit stays."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _print_nothing() -> None:
    """Discard what this process prints from now on, compiled code included."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with open(os.devnull, "w") as nothing:
        for number in (STDOUT, STDERR):
            os.dup2(nothing.fileno(), number)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Hide what Ray's compiled code prints while it connects, such as each attempt with a wrong token."""
    kept = os.dup(STDERR)
    try:
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), STDERR)
        yield
    finally:
        os.dup2(kept, STDERR)
        os.close(kept)


@contextlib.contextmanager
def _translate_ray_errors(withheld: bool = True) -> Iterator[None]:
    """Replace errors of Ray by `ShardError` or `DataError`, which depend on machines, or by `WorkersDied`.

    - withheld: hide the errors of our own code, whose messages could contain pixel values; default True.
    """
    from ray import exceptions

    try:
        yield
    except (exceptions.RayActorError, exceptions.OutOfMemoryError):  # the latter: a worker that took too much was ended
        raise WorkersDied(f"a call ended {RETRIES + 1} workers in a row") from None
    except (exceptions.ObjectStoreFullError, exceptions.OutOfDiskError):
        how = "store images as tar or Parquet files, use smaller networks, or give it more (connect(..., store=))"
        raise ShardError(f"the memory of the cluster is full; {how}") from None
    except exceptions.RayTaskError as error:
        if not withheld:
            raise error.cause from None
        raise RuntimeError("a worker failed") from None
    except (exceptions.RayError, ConnectionError) as error:
        raise ShardError(f"the cluster does not answer ({type(error).__name__})") from None


def _import_ray(address: str) -> Any:
    """Import Ray, which reads its settings when it is imported: a local cluster then requires a random token."""
    if "ray" not in sys.modules:
        os.environ.update({name: os.environ.get(name, value) for name, value in QUIET.items()})
        if address == "local" and "RAY_AUTH_MODE" not in os.environ:
            os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN})
    elif address == "local" and "RAY_AUTH_MODE" not in os.environ:
        what = "ray was imported before, so that the local cluster requires no token of whoever connects to its ports"
        warnings.warn(DataWarning(f"{what}. Set RAY_AUTH_MODE=token, or import ray later"), stacklevel=5)
    try:
        with warnings.catch_warnings(action="ignore"):
            import ray
            import ray.cloudpickle
    except ImportError as error:
        raise DataError("a cluster needs ray: pip install 'sfumato[cluster]'") from error
    return ray
