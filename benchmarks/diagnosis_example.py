"""The worked example of docs/diagnosis.md: prompts that begin with the time of day, and the same with it at the end.

python -m benchmarks.diagnosis_example               # prints the diagnosis, writes docs/diagnosis-example.svg
"""

from __future__ import annotations

import random
from pathlib import Path

from twostroke.bench.plots import HEIGHT, WIDTH, lanes
from twostroke.cli.diagnose import show_diagnosis
from twostroke.config import make_config
from twostroke.cost.answers.diagnose import diagnose
from twostroke.cost.model.devices import find_device
from twostroke.cost.model.known_models import known_arch
from twostroke.cost.simulation.deployment import Deployment
from twostroke.cost.simulation.served import Served
from twostroke.cost.simulation.trace import Arrival, Contents, PromptPart

STYLE = """text{font:11px system-ui,sans-serif;fill:#3b4552}.title{font-size:13px;font-weight:600}.grid{stroke:#e3e7ec}
rect.queue{fill:#b9bfc7}rect.prefill{fill:#3a6ea5}rect.decode{fill:#d9822b}"""


def stamped(count: int = 80, per_second: float = 6.0) -> list[Arrival]:
    rng, contents, at, rows = random.Random(0), Contents(), 0.0, []
    for _ in range(count):
        at += rng.expovariate(per_second)
        rows.append(Arrival(at, (contents.own(16), PromptPart(1, 4000), contents.own(rng.randint(40, 120))), 30))
    return rows


def bars(served: list[Served]) -> str:
    return lanes([(one.arrival, one.scheduled, one.first, one.end) for one in served])


def main() -> None:
    config = make_config(max_model_len=8192, seed=0)
    arch = known_arch("llama-3.1-8b")
    assert arch is not None
    deployment = Deployment(arch, find_device("l40s"), config)
    rows = stamped()
    found = diagnose(deployment, rows)
    show_diagnosis(found)
    assert found.best is not None
    before, after = deployment.run(rows).served, found.best.predicted.served
    height = 90 + 5 * len(rows)
    parts = [
        one.replace("<svg", f'<svg x="{number * WIDTH}" y="22" width="{WIDTH}" height="{height}"', 1)
        for number, one in enumerate((bars(before), bars(after)))
    ]
    captions = "".join(
        f'<text class="title" x="{58 + number * WIDTH}" y="14">{text}</text>'
        for number, text in enumerate(("as recorded", f"with {found.best.lever.name}"))
    )
    whole = max(HEIGHT, height) + 22
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {whole}"><style>{STYLE}</style>'
    path = Path(__file__).parent.parent / "docs" / "diagnosis-example.svg"
    path.write_text(f"{svg}{captions}{''.join(parts)}</svg>\n")


if __name__ == "__main__":
    main()
