"""What ranks on cards give each other: the parts of a sum, and the tokens of a step.

Over NCCL, from card to card, where each rank has a card of its own. NCCL refuses two ranks on one card: there the
numbers go through the host's memory over gloo, which is slow and serves trials.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from twostroke.errors import RankLostError

TIMEOUT = timedelta(minutes=10)  # longest wait for another rank: one that is gone is seen at once, by its socket


class Collective(Protocol):
    """Every rank makes the same calls in the same order, with arrays of the same shapes."""

    def sum(self, part: Tensor) -> Tensor:
        """The sum of what all ranks give, the same bits on each. It may use the memory of `part`."""

    def share(self, numbers: Tensor) -> None:
        """Give all ranks the numbers of rank 0, in place."""

    def close(self) -> None:
        """Ends what waits for other ranks."""


def in_order(parts: Tensor) -> Tensor:
    """The sum of (ranks, …) in the order of the ranks, in float32, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)


class NcclCollective:
    def __init__(self, group: Any, parts: int, ordered: bool):
        """ordered: sums are made in the order of the ranks. NCCL adds in an order that depends on the size."""
        self.group, self.parts, self.ordered = group, parts, ordered
        self.closed = False

    def sum(self, part: Tensor) -> Tensor:
        if not part.numel():
            return part
        if not self.ordered:
            self.group.allreduce([part]).wait()  # the stream waits, this process does not
            return part
        gathered = part.new_empty(self.parts, *part.shape)
        self.group._allgather_base(gathered, part).wait()
        return in_order(gathered)

    def share(self, numbers: Tensor) -> None:
        if numbers.numel():
            self.group.broadcast(numbers, 0).wait()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.group.abort()


class HostCollective:
    """Each call waits for the device."""

    def __init__(self, group: Any, parts: int, device: torch.device):
        self.group, self.parts, self.device = group, parts, device
        self.memory = torch.empty(0, dtype=torch.uint8)  # of one rank's part, and of all

    def sum(self, part: Tensor) -> Tensor:
        if not part.numel():
            return part
        mine, *all_parts = self._pieces(part.nbytes)
        mine.view(part.dtype).view(part.shape).copy_(part)
        with gloo_errors():
            self.group.allgather([all_parts], [mine]).wait()
        joined = self.memory[part.nbytes : (1 + self.parts) * part.nbytes].view(part.dtype)
        return in_order(joined.view(self.parts, *part.shape).to(self.device, copy=True))

    def _pieces(self, size: int) -> list[Tensor]:
        if self.memory.numel() < (1 + self.parts) * size:
            pinned = self.device.type == "cuda"
            self.memory = torch.empty((1 + self.parts) * size, dtype=torch.uint8, pin_memory=pinned)
        return [self.memory[n * size : (n + 1) * size] for n in range(1 + self.parts)]

    def share(self, numbers: Tensor) -> None:
        if not numbers.numel():
            return
        here = numbers.cpu()
        with gloo_errors():
            self.group.broadcast(here, 0).wait()
        numbers.copy_(here)

    def close(self) -> None:
        """gloo sees by itself that a rank is gone."""


@contextmanager
def gloo_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(f"a rank is gone: {error}") from None


def open_nccl(folder: Path, rank: int, parts: int, ordered: bool) -> NcclCollective:
    """Waits until all ranks are there. folder: of this engine alone, where ranks find each other. All are on one
    machine, so NCCL's sockets are on its loopback interface, unless the environment names another one."""
    from torch.distributed import FileStore, ProcessGroupNCCL  # a torch without CUDA has no such class

    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    options = ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    group = ProcessGroupNCCL(FileStore(str(folder / "cards"), parts), rank, parts, options)
    return NcclCollective(group, parts, ordered)


def check(collective: Collective, rank: int, parts: int, device: torch.device) -> None:
    """One sum before the first step: ranks that cannot reach each other are an error of the start."""
    found = float(collective.sum(torch.full((1, 8), rank + 1.0, device=device))[0, 0])
    if found != parts * (parts + 1) / 2:
        raise RuntimeError(f"the ranks' first sum is {found}, not {parts * (parts + 1) / 2}")
