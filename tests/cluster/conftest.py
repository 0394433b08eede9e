"""What tests of several files share."""

from tests.cluster.rays import ray_address, running_ray

__all__ = ["ray_address", "running_ray"]
