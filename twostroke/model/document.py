"""An architecture as plain data, for a server's description of its model, and back. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twostroke.model.arch import Arch, DenseArch, ExpertsArch, GroupedArch, LayerArch
from twostroke.model.compressed import CompressedArch, IndexArch
from twostroke.model.latent import LatentArch
from twostroke.ops.interface import Routing
from twostroke.record import as_data, values

_MIXERS: dict[str, type] = {"grouped": GroupedArch, "latent": LatentArch, "compressed": CompressedArch}
_FEEDS: dict[str, type] = {"dense": DenseArch, "experts": ExpertsArch}


def arch_document(arch: Arch) -> dict[str, Any]:
    """An `Arch` as plain data. Rotary positions cost no time and are left out."""
    described = {name: value for name, value in values(arch).items() if name != "layers"}
    described["layers"] = [
        {
            "mixer": {"kind": layer.mixer.kind, **_plain(layer.mixer)},
            "feed": {"kind": layer.feed.kind, **_plain(layer.feed)},
            "out_norms": layer.out_norms,
        }
        for layer in arch.layers
    ]
    return described


def _plain(part: Any) -> dict[str, Any]:
    return {name: as_data(value) for name, value in values(part).items() if name != "rope"}


def read_arch(document: Mapping[str, Any]) -> Arch:
    """An `Arch` from such a document; KeyError or TypeError where it is not one."""

    def part(values: Mapping[str, Any], kinds: Mapping[str, type]) -> Any:
        found = {name: value for name, value in values.items() if name != "kind"}
        if "routing" in found:
            found["routing"] = Routing(**found["routing"])
        if found.get("index") is not None:
            found["index"] = IndexArch(**found["index"])
        return kinds[values["kind"]](**found)

    layers = tuple(
        LayerArch(part(one["mixer"], _MIXERS), part(one["feed"], _FEEDS), one["out_norms"])
        for one in document["layers"]
    )
    return Arch(**{**document, "layers": layers})
