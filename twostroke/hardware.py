"""What this machine offers, as far as the engine must know. Torch-free."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

from twostroke.record import Record

CGROUP = Path("/sys/fs/cgroup")
ARM_CORES = {  # by their part number
    "0xd03": "ARM Cortex-A53", "0xd08": "ARM Cortex-A72", "0xd0b": "ARM Cortex-A76", "0xd0c": "ARM Neoverse-N1",
    "0xd40": "ARM Neoverse-V1", "0xd49": "ARM Neoverse-N2", "0xd4f": "ARM Neoverse-V2",
}  # fmt: skip


class Hardware(Record):
    device: str  # "cpu" or "cuda"
    cores: int
    free_memory: int  # bytes the KV cache and the weights may still take


def this_machine(device: str = "cpu") -> Hardware:
    return Hardware(device, usable_cores(), free_memory())


def usable_cores() -> int:
    """Cores this process may really use: affinity and the container's quota count, not what the machine has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read(CGROUP / "cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit() and int(quota[1]) > 0:
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return cores


def free_memory() -> int:
    """Bytes that can be allocated without swapping, within the container's limit."""
    free = _available_memory()
    limit, used = _read(CGROUP / "memory.max").strip(), _read(CGROUP / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        free = min(free, max(0, int(limit) - int(used)))
    return free


def _available_memory() -> int:
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return (
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    )  # no such file (macOS): half of what is built in


def machine_name() -> str:
    """The processor in words, where the system tells."""
    return _processor(_read(Path("/proc/cpuinfo"))) or platform.processor() or platform.machine()


def _processor(cpuinfo: str) -> str:
    """The processor's name from /proc/cpuinfo, which names an ARM core by numbers; "" where it is not known."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    fields = {name.strip(): value.strip() for name, _, value in lines}
    if "model name" in fields:
        return fields["model name"]
    return ARM_CORES.get(fields.get("CPU part", ""), "") if fields.get("CPU implementer") == "0x41" else ""


def cuda_devices() -> int:
    """CUDA devices that the driver shows to this process; 0 where there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
