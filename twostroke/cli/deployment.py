"""A model, a machine and a precision as they are typed, made into a deployment for the cost model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from twostroke.cli.terminal import errors, open_llm
from twostroke.config import QUANTIZATIONS, make_config
from twostroke.cost.answers.workers import precisions
from twostroke.cost.model.calibration import Calibration, calibration_path, load_calibration
from twostroke.cost.model.devices import DEVICES, Device, find_device
from twostroke.cost.model.known_models import CONFIGS, known_arch, known_format
from twostroke.cost.model.weight_formats import HELD, WEIGHT_BYTES, published_format
from twostroke.cost.simulation.deployment import Deployment
from twostroke.cost.simulation.fleet import MEASURED_LINKS, Pools
from twostroke.cost.units import seconds
from twostroke.errors import ConfigError, ModelError
from twostroke.model.arch import Arch
from twostroke.model.families import arch_from_config
from twostroke.weights.catalog import CATALOG, cache_folder, installed


class ModelFacts(NamedTuple):
    """What is known of a model before it is loaded."""

    arch: Arch
    stored: int | None  # bytes of the weights on a kind of device, where there is a file
    published: str | None  # the format of the weights (PUBLISHED); None: floats


def describe(model: str, device: str = "cpu") -> ModelFacts:
    """Nothing is downloaded for a model whose architecture is known."""
    from twostroke.weights.checkpoint import locate, open_checkpoint
    from twostroke.weights.describe import checkpoint_bytes, load_arch

    path = Path(model).expanduser()
    if path.name == "config.json" and path.is_file():
        try:
            config = json.loads(path.read_text())
        except ValueError as error:
            raise ModelError(f"{path}: not JSON ({error}): fetch it again.") from None
        return ModelFacts(arch_from_config(config, str(path)), None, published_format(config, str(path)))
    known = known_arch(model)
    if known is not None and not (model in CATALOG and installed(model)):
        return ModelFacts(known, None, known_format(model))
    try:
        checkpoint = open_checkpoint(locate(model))
    except ModelError as error:
        raise ModelError(
            f"{error} For a plan a config.json is enough, or a known model: {', '.join(CONFIGS)}."
        ) from None
    published = published_format(checkpoint.config) if checkpoint.scheme is not None else None
    return ModelFacts(load_arch(checkpoint), checkpoint_bytes(checkpoint, device), published and HELD[published])


def deployment_for(
    model: str, hardware: str, precision: str | None, gpus: int, settings: dict[str, Any]
) -> tuple[Deployment, Calibration | None]:
    calibration = calibrated(model) if hardware == "this" else None
    device = find_device(hardware) if calibration is None else calibration.device()
    arch, stored, published = describe(model, device.kind)
    config = make_config(**settings)
    heads = min(mixer.heads for mixer, _ in arch.mixers)  # type: ignore[attr-defined]
    if gpus > heads:
        raise ConfigError(f"--gpus {gpus}: {model} has {heads} heads to share out, so {heads} at most.")
    check_precision(precision, device, gpus)
    exact = stored if precision is None and config.dtype is None else None  # dtype: codes of the file are decoded to it
    given = precision or config.dtype
    if calibration is not None:
        rates, pools = calibration.rates, Pools(1, 0, *MEASURED_LINKS[device.kind])
        return Deployment(arch, device, config, given or "float32", exact, rates, pools=pools), calibration
    planned = given or published or "bfloat16"
    return Deployment(arch, device, config, planned, exact, gpus=gpus), None


def calibrated(model: str) -> Calibration:
    path = calibration_path(cache_folder(), model)
    if not path.exists():
        raise ConfigError(
            f"--hardware this: {model} was never measured on this machine: run `twostroke plan {model} --calibrate`, "
            f"or name a device: {', '.join(DEVICES)}."
        )
    return load_calibration(path)


def check_precision(precision: str | None, device: Device, gpus: int) -> None:
    if precision is not None and precision not in WEIGHT_BYTES:
        raise ConfigError(f"--precision {precision}: it must be one of {', '.join(WEIGHT_BYTES)}.")
    if precision in QUANTIZATIONS and precision not in precisions(device):
        raise ConfigError(
            f"--precision {precision} is not served on {device.title}: use {' or '.join(precisions(device))} there."
        )
    if gpus > 1 and device.kind == "cpu":
        raise ConfigError(f"--gpus {gpus}: {device.title} is one device; several share a model only on GPUs.")


def calibrate_here(model: str, settings: dict[str, Any]) -> Calibration:
    from twostroke.bench.calibrate import calibrate

    llm = open_llm(model, settings, ahead=True)
    stored = describe(model, llm.settings.device).stored
    assert stored is not None, "an engine that runs has a checkpoint"
    with errors.status("calibrating") as status:
        found = calibrate(llm, model, stored, progress=lambda text: status.update(f"calibrating: {text}"))
    path = calibration_path(cache_folder(), model)
    found.save(path)
    rates = found.rates
    errors.print(
        f"[dim]weights are read at {rates.bandwidth / 1e9:,.1f} GB/s, products run at {rates.compute / 1e9:,.0f} "
        f"GFLOP/s, a step costs {seconds(rates.step_seconds)} beside them[/dim]"
    )
    errors.print(
        f"[dim]{found.steps} steps, predicted within {found.errors['median']:.0%} (median) and "
        f"{found.errors['p95']:.0%} (p95); kept in {path}[/dim]"
    )
    return found
