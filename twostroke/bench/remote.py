"""A running twostroke through its admin routes: measure, diagnose, pull a lever, measure again."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twostroke.bench.apply import Applied, make_prediction
from twostroke.bench.client import Target
from twostroke.bench.record import Run
from twostroke.bench.workload import Load, renewed
from twostroke.cluster.group import workers_to_read
from twostroke.cost.answers.diagnose import Diagnosis, Effect, diagnose
from twostroke.cost.model.rates import Rates
from twostroke.cost.simulation.clustered import joined_steps
from twostroke.cost.simulation.recording import Recording, read_recording
from twostroke.cost.simulation.served import Targets
from twostroke.errors import InputError
from twostroke.hardware import machine_name
from twostroke.record import replace

if TYPE_CHECKING:
    import httpx

STEPS = 1024  # of the log that are requested
Measure = Callable[[Target, Load], Run]


class Admin:
    """The /twostroke routes of one server."""

    def __init__(self, target: Target):
        import httpx  # here: only talking to servers needs it

        headers = {"authorization": f"Bearer {target.key}"} if target.key else {}
        self.http = httpx.Client(base_url=target.base, headers=headers, timeout=60.0)
        self.trouble = (httpx.HTTPError, ValueError)

    def get(self, path: str) -> Any:
        try:
            answer = self.http.get(path)
            answer.raise_for_status()
            return answer.json()
        except self.trouble as error:
            raise InputError(f"{self.http.base_url}{path[1:]} does not answer as a twostroke does ({error}).") from None

    def _unreached(self, error: Exception) -> str:
        return f"{self.http.base_url}: cannot be reached ({error}): is the server up, the address right?"

    @property
    def known(self) -> bool:
        """Whether a twostroke answers there. A refused key is an error."""
        try:
            answer = self.http.get("/twostroke/settings")
        except self.trouble as error:
            raise InputError(self._unreached(error)) from None
        if answer.status_code == 401:
            raise InputError(f"{self.http.base_url}: refuses the key: give --api-key.")
        if answer.status_code == 403:
            raise InputError(f"{self.http.base_url}: wants an admin key for this: give one with --api-key.")
        if answer.status_code == 503 and error_code(answer) == "loading":
            raise InputError(f"{self.http.base_url}: is still loading its model: ask again in a moment.")
        return answer.status_code == 200

    def recording(self, rates: Rates | None = None, workers: Mapping[str, Any] | None = None) -> Recording:
        """workers: of a cluster, what `workers` gave."""
        settings, arrivals = self.get("/twostroke/settings"), self.get("/twostroke/arrivals")
        return read_recording(settings, arrivals, self._steps(workers), rates=rates)

    def _steps(self, workers: Mapping[str, Any] | None) -> dict[str, Any]:
        path = f"/twostroke/steps?limit={STEPS}"
        names = [] if workers is None else workers_to_read(workers)
        return joined_steps([self.get(f"{path}&worker={name}") for name in names] or [self.get(path)])

    def change(self, settings: dict[str, Any], path: str = "/twostroke/settings") -> None:
        """InputError with the server's message when it refuses them."""
        try:
            answer = self.http.post(path, json=settings)
            if answer.status_code != 200:
                raise InputError(f"the server did not take {settings}: {answer.json()['error']['message']}")
        except self.trouble as error:
            raise InputError(self._unreached(error)) from None

    def workers(self) -> dict[str, Any] | None:
        """The workers of a cluster and its transfers; None: there is one engine."""
        try:
            answer = self.http.get("/twostroke/workers")
            return answer.json() if answer.status_code == 200 else None
        except self.trouble as error:
            raise InputError(self._unreached(error)) from None

    def totals(self) -> dict[str, float]:
        """Counters and gauges of /metrics without further labels, by name."""
        try:
            text = self.http.get("/metrics").text
        except self.trouble as error:
            raise InputError(f"{self.http.base_url}metrics: cannot be read ({error}).") from None
        rows = re.findall(r'^([\w:]+)\{model_name="[^"]*"\} (\S+)$', text, re.MULTILINE)
        return {name: float(value) for name, value in rows}


def error_code(answer: httpx.Response) -> str | None:
    try:
        return str(answer.json()["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True, slots=True)
class MeasuredLoad:
    run: Run
    recording: Recording
    diagnosis: Diagnosis


def diagnose_load(
    admin: Admin, target: Target, load: Load, measure: Measure, targets: Targets, rates: Rates | None = None
) -> MeasuredLoad:
    """A diagnosis under a given load: the client's times, and rates from a calibration or from the steps of that
    load."""
    vocabulary = admin.get("/twostroke/settings")["arch"]["vocab"]
    run = measure(replace(target, vocabulary=vocabulary), load)
    recording = admin.recording(rates)
    paced = run.rate is not None
    found = diagnose(recording.deployment, run.arrivals(), run.served(), targets, paced=paced)
    return MeasuredLoad(run, recording, found)


def diagnose_recorded(admin: Admin, targets: Targets, rates: Rates | None = None) -> Diagnosis:
    """A diagnosis from the requests that the server answered last; nothing is sent."""
    recording = admin.recording(rates)
    if not recording.arrivals:
        raise InputError("the server has answered nothing yet: give a load with --workload, or try again later.")
    return diagnose(recording.deployment, recording.arrivals, recording.served, targets)


def apply_live(
    admin: Admin, target: Target, load: Load, measure: Measure, targets: Targets, rates: Rates | None = None
) -> Applied | Diagnosis:
    """Diagnose, pull the best lever that the running server takes, and measure again. Without one: the diagnosis
    alone."""
    before = diagnose_load(admin, target, load, measure, targets, rates)
    effect = next((one for one in before.diagnosis.effects if pull(admin, one)), None)
    if effect is None:
        return before.diagnosis
    vocabulary = before.recording.deployment.arch.vocab
    after = measure(replace(target, vocabulary=vocabulary), renewed(load))
    prediction = make_prediction(before.diagnosis, effect, before.run, after, machine_name(), before.run.model)
    return Applied(before.diagnosis, effect, before.run, after, prediction, live=True)


def pull(admin: Admin, effect: Effect) -> bool:
    """Whether the server took the lever's settings."""
    if effect.lever.setting is None:
        return False
    wanted = effect.lever.setting(effect.after.deployment)
    given = {name: value for name, value in wanted.items() if value is not None}
    try:
        admin.change(given)
    except InputError:
        return False
    return True
