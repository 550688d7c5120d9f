"""Rules for the fields of a configuration."""

import math
from typing import Any

MAX_SIZE = 2**31 - 1  # of a single dimension


def require(holds: bool, field: str, value: object, rule: str) -> None:
    """Raise a ValueError that names a field, its value and the rule it breaks, unless the rule holds."""
    if not holds:
        raise ValueError(f"{field} = {value!r}: it {rule}.")


def require_finite(config: Any, field: str, *, above: float | None = None, least: float = -math.inf) -> None:
    """Raise a ValueError unless a field is a finite number greater than `above`, or at least `least`."""
    value = getattr(config, field)
    rule = f"greater than {above}" if above is not None else f"at least {least}" if least > -math.inf else "finite"
    holds = math.isfinite(value) and (value > above if above is not None else value >= least)
    require(holds, field, value, f"must be {rule}" if rule == "finite" else f"must be finite and {rule}")


def require_size(config: Any, field: str, most: int = MAX_SIZE, hint: str = "") -> None:
    """Raise a ValueError unless a field is at least 1 and at most `most`."""
    value = getattr(config, field)
    require(value >= 1, field, value, f"must be at least 1{hint}")
    require(value <= most, field, value, f"must be at most {most}{hint}")
