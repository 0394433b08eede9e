"""The Ray driver of a deployment, in a process of its own: it places workers as actors and starts them again.

Ray ends drivers that lose their cluster. The router is not one: it serves on, and starts this process again. When the
router ends, so does this process, with it the actors, and a Ray that was started here.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from twostroke.cluster.placing import (
    ClusterAbsent,
    Connect,
    Connected,
    FromDriver,
    Kill,
    PlacementImpossible,
    PlaceWorkers,
    ToDriver,
    WorkerDied,
)
from twostroke.remote import wire

INSTALL = "this command needs Ray: pip install 'twostroke[cluster]'."
OLDEST = (2, 49)  # version of Ray, as in pyproject.toml
LOOPBACK = "127.0.0.1"
CHUNK = 1 << 16
REACH_SECONDS = 5.0
PLACE_SECONDS = 30.0  # for cores that others give back
BACKOFF, BACKOFF_MOST = 0.5, 30.0  # seconds before a worker is started again
OOM = (
    "it ran out of memory: lower kv_memory or kv_blocks, take quantize=int8 or int4, or use fewer workers on a machine"
)


class WorkerProcess:
    """The actor. Its process is the agent of a worker (agent.py)."""

    def run(self, number: int, router: str, secret: bytes, interface: str, neighbours: int, transport: str) -> None:
        """Run the worker's agent until the router is gone."""
        from twostroke.cluster.agent import Post, serve

        serve(Post(number, router, secret, interface or own_address(), neighbours, transport))


def own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


class ImpossibleError(Exception):
    pass


class Driver:
    def __init__(self, sock: socket.socket):
        self.sock = sock
        self.reader: wire.Reader[ToDriver] = wire.Reader(ToDriver)
        self.own = False
        self.actors: dict[int, Any] = {}
        self.tasks: set[asyncio.Task[None]] = set()

    def send(self, message: FromDriver) -> None:
        self.sock.sendall(wire.encode(message))  # the messages are small, and the router reads

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            data = await loop.sock_recv(self.sock, CHUNK)
            if not data:
                return
            for message in self.reader.feed(data):
                try:
                    await self.obey(message)
                except ImpossibleError as error:
                    self.send(PlacementImpossible(str(error)))
                    return

    async def obey(self, message: ToDriver) -> None:
        if isinstance(message, Connect):
            self.send(self.connect(message))
        elif isinstance(message, PlaceWorkers):
            await self.place(message)
        elif isinstance(message, Kill) and message.worker in self.actors:
            import ray

            ray.kill(self.actors[message.worker])

    # ---- the cluster -------------------------------------------------------------------------------------------------

    def connect(self, wanted: Connect) -> Connected | ClusterAbsent:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError:
            raise ImpossibleError(INSTALL) from None
        check_version(ray.__version__)
        if wanted.address is not None and wanted.address.startswith("ray://"):
            raise ImpossibleError(
                f"--address {wanted.address}: the router is a driver of the cluster and not a Ray client: run this "
                "command on a machine of the cluster, with --address auto."
            )
        if wanted.address is None:
            self.start_own(wanted.cores)
        elif not self.join(wanted.address):
            return ClusterAbsent()
        nodes = [node for node in ray.nodes() if node["Alive"]]
        free = ray.available_resources()
        cores = tuple(float(node["Resources"].get("CPU", 0.0)) for node in nodes)
        address = ray.get_runtime_context().gcs_address
        interface = LOOPBACK if self.own else own_address()
        return Connected(self.own, address, interface, cores, float(free.get("GPU", 0.0)))

    def join(self, wanted: str) -> bool:
        """False: no cluster runs on this machine, and none was named."""
        named = os.environ.get("RAY_ADDRESS") if wanted == "auto" else wanted
        if named:
            check_reachable(named)
            return self.init(named, True)
        noted = noted_cluster()
        return noted is not None and self.init(noted, False)

    def init(self, address: str, named: bool) -> bool:
        import ray

        try:
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        except ConnectionError as error:
            if not named:
                return False
            raise ImpossibleError(not_there(address, first_line(error))) from None
        except RuntimeError as error:
            said = " ".join(str(error).split())
            if "ersion mismatch" not in said:
                raise
            raise ImpossibleError(
                f"the Ray cluster at {address} runs other versions ({said}): install the same Ray and Python on all of "
                "its machines, or leave --address out."
            ) from None
        return True

    def start_own(self, cores: int) -> None:
        import ray

        self.own = True
        ray.init(
            address="local", num_cpus=cores, include_dashboard=False, log_to_driver=False, configure_logging=False,
            _node_ip_address=LOOPBACK,
        )  # fmt: skip

    # ---- workers -----------------------------------------------------------------------------------------------------

    async def place(self, wanted: PlaceWorkers) -> None:
        from ray.util.placement_group import placement_group, placement_group_table

        bundles = [
            {"CPU": cores} | ({"GPU": gpus} if gpus else {})
            for cores, gpus in zip(wanted.cores, wanted.gpus, strict=True)
        ]
        group = None
        machines = [""] * len(bundles)
        if all(wanted.cores):
            group = placement_group(bundles, strategy="PACK")
            if not await asyncio.to_thread(group.wait, PLACE_SECONDS):
                raise ImpossibleError(self.no_room(wanted))
            table = placement_group_table(group)["bundles_to_node_id"]
            machines = [table[index] for index in range(len(bundles))]
        for number in range(len(bundles)):
            task = asyncio.get_running_loop().create_task(
                self.keep(wanted, number, group, machines.count(machines[number]))
            )
            self.tasks.add(task)

    def no_room(self, wanted: PlaceWorkers) -> str:
        import ray

        free = ray.available_resources()
        gpus = f" and {sum(wanted.gpus):g} GPUs" if any(wanted.gpus) else ""
        return (
            f"the Ray cluster has no room for {len(wanted.cores)} workers with {wanted.cores[0]:g} cores each{gpus}: "
            f"{free.get('CPU', 0):g} cores and {free.get('GPU', 0):g} GPUs are free. Start fewer workers, lower "
            "threads, or end what else runs there."
        )

    async def keep(self, wanted: PlaceWorkers, number: int, group: Any, neighbours: int) -> None:
        """One worker's processes, one after the other."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        failures = 0
        loop = asyncio.get_running_loop()
        while True:
            options: dict[str, Any] = {"num_cpus": wanted.cores[number], "num_gpus": wanted.gpus[number]}
            if group is not None:
                options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, number)
            began = loop.time()
            actor: Any = ray.remote(WorkerProcess).options(**options).remote()
            self.actors[number] = actor
            interface = LOOPBACK if self.own else ""
            try:
                await actor.run.remote(number, wanted.router, wanted.secret, interface, neighbours, wanted.transport)
                why, fatal = "it lost its line to the router", False
            except ray.exceptions.RayError as error:
                why, fatal = reason(error)
            self.send(WorkerDied(number, why, fatal))
            failures = 0 if loop.time() - began > 60 else failures + 1
            await asyncio.sleep(min(BACKOFF_MOST, BACKOFF * 2 ** max(0, failures - 1)))


def check_version(version: str) -> None:
    found = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if found < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ImpossibleError(f"Ray {version} is too old, {oldest} is needed: pip install -U 'twostroke[cluster]'.")


def reason(error: Exception) -> tuple[str, bool]:
    """Why an actor has ended, and whether the next one would end so too."""
    import ray

    text = str(error)
    if isinstance(error, ray.exceptions.OutOfMemoryError) or "OOM" in text.split("Some common causes")[0]:
        return OOM, True
    if isinstance(error, ray.exceptions.RayTaskError):
        return f"it failed: {text.strip().splitlines()[-1]}", True
    return "its process is gone", False


def not_there(address: str, why: str) -> str:
    return (
        f"no Ray cluster answers at {address} ({why}): start one with `ray start --head` there, or leave --address "
        "(and RAY_ADDRESS) out."
    )


def check_reachable(address: str) -> None:
    """Ray itself would try for a minute."""
    host, sign, port = address.rpartition(":")
    if not sign or not port.isdigit():
        return  # "auto", or a name that Ray knows
    try:
        socket.create_connection((host, int(port)), REACH_SECONDS).close()
    except OSError as error:
        raise ImpossibleError(not_there(address, first_line(error))) from None


def noted_cluster() -> str | None:
    """The cluster that `ray start` has begun on this machine, as it notes it, if one still answers there. Ray itself
    would also try any Ray that it finds among the processes, such as the local one of another deployment."""
    folder = os.environ.get("RAY_TMPDIR") or (sys.platform == "linux" and os.environ.get("TMPDIR")) or "/tmp"
    try:
        address = (Path(folder) / "ray" / "ray_current_cluster").read_text().strip()
        check_reachable(address)
    except (OSError, ImpossibleError):  # there is none, or it is gone
        return None
    return address


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


async def drive(sock: socket.socket) -> None:
    driver = Driver(sock)
    try:
        await driver.run()
    finally:
        for task in driver.tasks:
            task.cancel()


def main(descriptor: str) -> None:
    """The router's end closes the socket, in whatever way it ends. A Ray that was started here then ends in order."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock = socket.socket(fileno=int(descriptor))
    sock.setblocking(False)
    try:
        asyncio.run(drive(sock))
    finally:
        if "ray" in sys.modules:
            import ray

            ray.shutdown()
