"""What a server takes, and how it says what it does not take."""

import ipaddress
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

MIB = 2**20


@dataclass(frozen=True)
class ServingLimits:
    """Limits of a server.

    Attributes:
        max_waiting: Requests at most that wait for a row, beyond those that have one; others are answered 429.
        max_body_bytes: Bytes of the body of a request at most.
        max_prompt_tokens: Tokens of a prompt at most.
        max_new_tokens: Tokens of an answer at most.
        hosts: Names by which the server may be addressed, beside IP addresses; `None` for any. A page that makes its
            own name point to this machine is kept out by them.
        body_seconds: Seconds in which the body of a request must have come.

    Raises:
        ValueError: If a limit is impossible.
    """

    max_waiting: int = 128
    max_body_bytes: int = 8 * MIB
    max_prompt_tokens: int = 1_000_000
    max_new_tokens: int = 32_768
    hosts: Collection[str] | None = None
    body_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in ("max_waiting", "max_body_bytes", "max_prompt_tokens", "max_new_tokens"):
            value, least = getattr(self, name), 0 if name == "max_waiting" else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} = {value!r}: it must be a whole number, at least {least}.")

    def is_addressed(self, host: str) -> bool:
        """Return whether a Host header names this server.

        Args:
            host: The header: a name or an address, with a port or without.
        """
        if self.hosts is None:
            return True
        name = host.rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
        name = name.lower().rstrip(".")
        return name in self.hosts or _is_address(name)


def _is_address(name: str) -> bool:
    """Return whether a host is an IP address, to which no name was made to point."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@dataclass
class RefusedError(Exception):
    """A request that is not answered.

    Attributes:
        status: HTTP status.
        message: Why, and what to do.
        code: A word for programs; OpenAI's where it has one.
        headers: Further headers of the answer.
    """

    status: int
    message: str
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        """Return the answer, as OpenAI words errors."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": None, "code": self.code}}
