"""What the parts of benchmarks/gpu.py share: the measured ceilings, the results so far, and one engine at a time."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field

import torch

from benchmarks.gpu_rig import Rig, make_rig
from benchmarks.random_weights import LLAMA_8B
from twostroke.model.arch import Arch

# vLLM 0.26.0 on such a card (FlashAttention 3, compiled, CUDA graphs), measured once: not every box can install it.
VLLM = {"decode1": 200.9, "ttft512": 16.9, "ttft2048": 51.7, "ttft8192": 221.0, "ttft32768": 1201.6,
        "offline256": 6816, "offline64": 5805, "prefix_cold": 0.70, "prefix_warm": 0.63,
        "small_decode1": 395}  # fmt: skip


@dataclass
class Bench:
    """Ceilings, results, and one engine at a time (each takes nearly all memory)."""

    suffix: str = ""  # of every row's name, for a run with other settings
    settings: dict[str, object] = field(default_factory=dict)  # of every engine
    ceilings: dict[str, float] = field(default_factory=dict)
    rows: dict[str, object] = field(default_factory=dict)
    _rig: tuple[Arch, Rig] | None = None

    def rig(self, arch: Arch = LLAMA_8B) -> Rig:
        """The engine with the default settings, kept from part to part."""
        if self._rig is None or self._rig[0] is not arch:
            self.drop()
            self._rig = (arch, make_rig(arch, **self.settings))
        return self._rig[1]

    def own(self, arch: Arch, **settings: object) -> Rig:
        """An engine with settings of its own, for one part."""
        self.drop()
        return make_rig(arch, **{**self.settings, **settings})  # type: ignore[arg-type]

    def drop(self) -> None:
        self._rig = None
        gc.collect()
        torch.cuda.empty_cache()

    def report(
        self, name: str, value: float, unit: str, limit: float | None = None, higher: bool = True, **more: object
    ) -> None:
        share = (value / limit if higher else limit / value) if limit else None
        peer = VLLM.get(name)
        ahead = (value / peer if higher else peer / value) if peer else None
        row = {
            "value": round(value, 4), "unit": unit, "limit": limit and round(limit, 3),
            "share": share and round(share, 3), "vllm": peer, "times_vllm": ahead and round(ahead, 3), **more,
        }  # fmt: skip
        self.rows[name + self.suffix] = {key: item for key, item in row.items() if item is not None}
        text = f"{name + self.suffix:24s} {value:12.3f} {unit:10s}"
        text += f" limit {limit:10.2f} ({share:.1%})" if limit else ""
        text += f"  vLLM {peer} ({ahead:.2f}x)" if ahead else ""
        print(text, "".join(f"  {k}={v}" for k, v in more.items()), flush=True)
