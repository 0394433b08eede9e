"""Numbers as people read them."""

from __future__ import annotations


def seconds(value: float) -> str:
    if 0 < value < 5e-5:
        return f"{1e6 * value:.2g} µs"
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.0f} ms" if value >= 0.01 else f"{1000 * value:.1f} ms"


def per_second(requests: float) -> str:
    return f"{requests:,.10g} {'request' if requests == 1 else 'requests'}/s"


def times(ratio: float) -> str:
    return f"×{ratio:.2f}" if ratio >= 0.1 else f"×{ratio:.2g}"
