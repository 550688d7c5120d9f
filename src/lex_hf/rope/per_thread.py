"""What hooks note during a forward pass, for each thread by itself."""

import threading
from typing import Generic, TypeVar

_Value = TypeVar("_Value")


class PerThread(Generic[_Value]):
    """A value that each thread has of its own, as one model may be called in several at once.

    Copies begin empty: what a thread notes belongs to a forward pass of the object that is copied.
    """

    def __init__(self) -> None:
        self._local = threading.local()  # not its base class: compilers cannot trace classes derived from it

    @property
    def value(self) -> _Value | None:
        """What this thread has set last; `None` if nothing."""
        return getattr(self._local, "value", None)

    @value.setter
    def value(self, value: _Value | None) -> None:
        self._local.value = value

    def __reduce__(self) -> tuple[type["PerThread[_Value]"], tuple[()]]:
        """Copy and pickle without values."""
        return type(self), ()
