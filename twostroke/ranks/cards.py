"""Ranks that compute on GPUs, rank i on card i: what rank 0 sees of the others, and what each of these does."""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch

from twostroke.config import Resolved
from twostroke.errors import ConfigError, ModelError, RankLostError
from twostroke.kv.layout import make_layout
from twostroke.kv.storage import KVStorage
from twostroke.model.parallel import ParallelTransformer, not_yet
from twostroke.model.shares import Share
from twostroke.model.transformer import Transformer
from twostroke.ops.cuda.backend import CudaOps
from twostroke.ops.interface import Ops
from twostroke.ops.select import make_ops
from twostroke.ranks.group import FREE, STEP, Ranks, closed, open_gloo
from twostroke.run.cuda.collective import Collective, HostCollective, check, open_nccl
from twostroke.run.cuda.ranked import LOOK_SECONDS, Follower, Lead, LeadingTransformer
from twostroke.weights.checkpoint import open_checkpoint
from twostroke.weights.load import load_model

log = logging.getLogger(__name__)
SHARE_VARIABLE = "TWOSTROKE_SHARE_CARD"  # of the environment: ranks may have a card together
IN_ANY_ORDER = 2  # ranks whose sum has the same bits in any order


def check_cards(parts: int, cards: int, shared: bool) -> None:
    if parts > cards and not shared:
        raise ConfigError(
            f"parallel={parts} needs {parts} GPUs, one for each rank, and torch sees {cards}: lower parallel, leave it "
            f"out or use device='cpu'. For a trial, {SHARE_VARIABLE}=1 in the environment lets ranks share a GPU."
        )
    if parts > cards:
        log.warning(
            "%d ranks share %s (%s): their sums go through the host's memory over gloo, which is slow; NCCL refuses "
            "two ranks on one GPU.",
            parts, "one GPU" if cards == 1 else f"{cards} GPUs", SHARE_VARIABLE,
        )  # fmt: skip


def may_share() -> bool:
    return os.environ.get(SHARE_VARIABLE, "") not in ("", "0")


def count_cards() -> int:
    return torch.cuda.device_count()


def free_on_card() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def open_collective(folder: Path, rank: int, parts: int, cards: int, ops: Ops) -> Collective:
    """Waits until all ranks are there."""
    assert isinstance(ops, CudaOps)
    try:
        if parts > cards:
            collective: Collective = HostCollective(open_gloo(folder, rank, parts), parts, ops.device)
        else:
            collective = open_nccl(folder, rank, parts, ops.one_order and parts > IN_ANY_ORDER)
        check(collective, rank, parts, ops.device)
    except (RuntimeError, RankLostError) as error:
        raise ModelError(f"the {parts} ranks do not reach each other: {error}") from None
    return collective


class CardRanks(Ranks):
    """The other ranks, as the leading one sees them."""

    def __init__(self, model: Path, settings: Resolved):
        self.cards = count_cards()
        check_cards(settings.parallel, self.cards, may_share())
        super().__init__(model, settings, self.cards)

    def lead(self, ops: Ops) -> Lead:
        """Called when every rank has its share."""
        self.await_shares()
        collective = self._opened(ops)
        self.collectives.append(collective)
        return Lead(collective, self.tell_step, self.lost, self.reserve, self.free)

    def _opened(self, ops: Ops) -> Collective:
        """Opened by a thread that cannot be interrupted while it waits for the others: this one looks at their sockets
        meanwhile. ModelError: one has ended."""
        made, folder, card = Future[Collective](), Path(self.folder.name), current_card()

        def work() -> None:
            try:
                take_card(card)
                made.set_result(open_collective(folder, 0, self.parts, self.cards, ops))
            except BaseException as error:
                made.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        while not wait([made], LOOK_SECONDS).done:
            if self.lost():
                raise ModelError("a rank has ended before all had met: what it printed says why")
        return made.result()

    def leading(self, ops: Ops, *parts: Any, **more: Any) -> Transformer:
        return LeadingTransformer(*parts, lead=self.lead(ops), **more)

    def tell_step(self, body: bytes) -> None:
        self.tell_all(STEP + body)

    def lost(self) -> bool:
        return any(map(closed, self.sockets))

    def free(self) -> int:
        """Bytes for each rank on the card that has the fewest."""
        self.tell_all(FREE)
        found = [free_on_card(), *(int.from_bytes(content, "little") for _, content in self.answers())]
        return min(found) // -(-self.parts // self.cards)


class CardRank:
    """Another rank than the leading one, in its own process."""

    def __init__(self, hello: dict[str, Any]):
        given, share = hello["settings"], Share(hello["rank"], hello["parts"])
        take_card(share.rank % hello["cards"])
        self.hello = hello
        self.ops = make_ops(given["device"], given["dtype"], given["threads"], given["quantize"], given["exact"])

        def make(*parts: Any, **more: Any) -> Transformer:
            return ParallelTransformer(*parts, sum_ranks=not_yet, **more)

        checkpoint = open_checkpoint(Path(hello["model"]))
        model = load_model(checkpoint, self.ops, given["max_model_len"], None, None, share, make)
        assert isinstance(model, ParallelTransformer)
        self.model, self.layout = model, make_layout(model.arch, given["kv_dtype"])
        self._kv: KVStorage | None = None

    def open(self) -> None:
        """Find the other ranks."""
        hello = self.hello
        place = Path(hello["folder"]), hello["rank"], hello["parts"], hello["cards"]
        assert isinstance(self.ops, CudaOps)
        self.follower = Follower(self.model, self.ops, open_collective(*place, self.ops))

    @property
    def kv(self) -> KVStorage:
        assert self._kv is not None, "rank 0 says how large the cache is before it is used"
        return self._kv

    def step(self, body: bytes) -> None:
        self.follower.step(body, self.kv)

    def reserve(self, blocks: int) -> None:
        self._kv = None  # first: both may not fit
        self._kv = KVStorage(self.layout, blocks, self.hello["settings"]["kv_dtype"], self.ops.device)

    def free(self) -> int:
        self._kv = None
        return free_on_card()


def take_card(number: int) -> None:
    """Make this the card of the thread that calls it."""
    torch.cuda.set_device(number)


def current_card() -> int:
    return torch.cuda.current_device()
