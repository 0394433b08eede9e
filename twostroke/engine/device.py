"""The device that an engine computes on: which one, what it is called and has free, and which models it serves."""

from __future__ import annotations

from importlib.util import find_spec

from twostroke.config import DEFAULT_BATCH_TOKENS, DEFAULT_REQUESTS, Config
from twostroke.errors import ConfigError
from twostroke.hardware import Hardware, cuda_devices, machine_name, this_machine
from twostroke.model.arch import Arch, GroupedArch
from twostroke.model.compressed import CompressedArch
from twostroke.model.latent import LatentArch
from twostroke.record import replace


def choose_device(config: Config) -> str:
    """Torch is imported only where the driver has a device."""
    if config.device == "cuda" and not cuda_available():
        raise ConfigError("device='cuda' was asked for, but torch sees no CUDA device: use device='cpu'.")
    if config.device is not None:
        return config.device
    return "cuda" if find_spec("triton") is not None and cuda_devices() and cuda_available() else "cpu"


def check_attention(arch: Arch, device: str) -> None:
    """A GPU has kernels for grouped, latent and compressed attention."""
    if device != "cuda":
        return
    for mixer, _ in arch.mixers:
        if not isinstance(mixer, GroupedArch | LatentArch | CompressedArch):
            raise ConfigError(
                f"device='cuda' does not serve {mixer.kind} attention, which {arch.family} has: use device='cpu'."
            )


def cuda_available() -> bool:
    import torch

    return torch.cuda.is_available()


def device_name(device: str) -> str:
    """The processor or the card that computes, by its own name."""
    if device != "cuda":
        return machine_name()
    import torch

    return torch.cuda.get_device_name()


def hardware_of(device: str, arch: Arch) -> Hardware:
    """The machine; its free memory less what a step of the default size takes beside weights and cache."""
    machine = this_machine(device)
    if device != "cuda":
        return machine
    import torch

    rows = DEFAULT_BATCH_TOKENS[device]
    widest = max(product.outputs for product in arch.products)
    step = 2 * rows * (2 * widest + 8 * arch.hidden) + 6 * DEFAULT_REQUESTS[device] * arch.vocab + (2 << 30)
    return replace(machine, free_memory=max(0, torch.cuda.mem_get_info()[0] - step))
