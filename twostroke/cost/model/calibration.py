"""Measured rates of a machine with a model, kept as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from twostroke.cost.model.devices import DEVICES, Device, known_gpu
from twostroke.cost.model.rates import Rates, rates_from
from twostroke.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Calibration:
    """Rates measured on a machine with a model; one JSON file per model in the cache folder."""

    machine: str
    model: str
    rates: Rates
    memory: int  # bytes that were usable at the time
    cores: int
    kind: str = "cpu"
    steps: int = 0  # in the log that the rates were fitted to
    errors: dict[str, float] = field(default_factory=dict)  # of the fit: median and p95 of |predicted − measured|

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    def device(self) -> Device:
        """The machine as an entry of the table, with measured values in place of the datasheet's. The rates of fp8 and
        int8 are the measured ones times the datasheet's ratio."""
        rates = self.rates
        flops = {"float32": rates.compute, "bfloat16": rates.compute, "float16": rates.compute}
        known = next((device for device in DEVICES.values() if device.title == self.machine), known_gpu(self.machine))
        if known is not None:
            narrow = {name: rate / known.peak("bfloat16") for name, rate in known.flops.items() if name not in flops}
            flops |= {name: times * rates.compute for name, times in narrow.items()}
        title = f"{self.machine} (measured)"
        return Device("this", title, self.kind, self.memory, rates.bandwidth, flops, None, 10e9, self.cores)


def load_calibration(path: Path) -> Calibration:
    try:
        document: dict[str, Any] = json.loads(path.read_text())
        return Calibration(rates=rates_from(document.pop("rates")), **document)
    except OSError:
        raise ConfigError(
            f"{path}: no calibration of this machine yet: run `twostroke plan MODEL --calibrate`."
        ) from None
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path}: not a calibration ({error}): delete it and calibrate again.") from None


def calibration_path(folder: Path, model: str) -> Path:
    safe = "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in Path(model).name)
    return folder / "calibration" / f"{safe}.json"
