"""What tests of several files share: one Ray, and the server that answers are compared with."""

from tests.cluster.one_server import expected, one_engine
from tests.cluster.rays import ray_address, running_ray

__all__ = ["expected", "one_engine", "ray_address", "running_ray"]
