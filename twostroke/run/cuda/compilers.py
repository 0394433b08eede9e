"""Kernels that no cache holds are compiled by processes of their own: threads of one process would wait for each other,
since half of a compilation is Python.

First the kernels are launched without effect, which tells what is to be compiled. The processes are copies of this one
(fork), so that they need not import anything; they touch no device, and leave what they compile in Triton's cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler import ASTSource, make_backend
from triton.runtime import driver
from triton.runtime.cache import get_cache_key, get_cache_manager

from twostroke.hardware import usable_cores

PROCESSES = 12
WORTH = 4  # kernels that are worth the processes
SECONDS = 60.0  # what takes longer is compiled here, when it is launched
log = logging.getLogger("twostroke")
Task = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A kernel for one kind of arguments."""

    source: Any
    options: dict[str, Any]

    def is_cached(self, target: Any) -> bool:
        backend = make_backend(target)
        options = backend.parse_options(self.options)
        key = get_cache_key(self.source, backend, options, env_vars=get_cache_invalidating_env_vars())
        files = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        return files.get_group(f"{self.source.name[:150]}.json") is not None


def compile_apart(tasks: Sequence[Task], meanwhile: Callable[[], None]) -> None:
    """Compile what the tasks launch. `meanwhile` runs here while others compile, in any case. Nothing depends on the
    success: a kernel that is missing afterwards is compiled when it is launched."""
    processes: list[Any] = []
    try:
        processes = start(missing_kernels(tasks))
    except Exception as error:  # another version of Triton may name things otherwise
        log.info("kernels are compiled in this process: %s: %s", type(error).__name__, error)
    meanwhile()
    ends = time.monotonic() + SECONDS
    for process in processes:
        process.join(max(0.0, ends - time.monotonic()))
        if process.is_alive():
            process.kill()


def missing_kernels(tasks: Sequence[Task]) -> list[Wanted]:
    found: dict[tuple[str, str], Wanted] = {}

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:  # noqa: A002
        given = json.loads(compile["specialization_data"])["options"]
        options = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
        source = ASTSource(fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0])
        found.setdefault((fn.name, compile["specialization_data"]), Wanted(source, options))
        return True  # not to be compiled now

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, note
    try:
        with torch.inference_mode():
            for task in tasks:
                task()
    finally:
        knobs.runtime.jit_cache_hook = before
    target = driver.active.get_current_target()
    return [wanted for wanted in found.values() if not wanted.is_cached(target)]


def start(wanted: Sequence[Wanted]) -> list[Any]:
    """Processes that compile, each taking the next one."""
    if len(wanted) < WORTH:
        return []
    target, context = driver.active.get_current_target(), multiprocessing.get_context("fork")
    taken = context.Value("i", 0)

    def work() -> None:
        while True:
            with taken.get_lock():
                number = taken.value
                taken.value += 1
            if number >= len(wanted):
                return
            triton.compile(wanted[number].source, target=target, options=wanted[number].options)

    processes = [context.Process(target=work, daemon=True) for _ in range(min(PROCESSES, usable_cores(), len(wanted)))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: these copies hold no locks
        for process in processes:
            process.start()
    return processes
