"""The error tree, by whose fault it is: the caller, the data, the store, or a state that does not fit.

Every message names the thing, the value that was found, and the cure. Errors of libraries appear only as
``__cause__``, so that a caller never has to import a transport to catch its failures.
"""

from __future__ import annotations


class StreamshardError(Exception):
    """Base of everything this package raises on purpose."""


class UsageError(StreamshardError, ValueError):
    """The call cannot work as written: change an argument or the place of the call."""


class DataError(StreamshardError, ValueError):
    """The stored bytes, or what a step made of them, are not what they must be."""


class StorageError(StreamshardError, OSError):
    """The store did not deliver. ``kind`` says why.

    ``kind`` is one of ``missing``, ``denied``, ``expired`` (credentials), ``changed`` (the object was replaced), ``corrupt``
    (wrong bytes), ``throttle``, ``timeout``, ``transient``.
    """

    def __init__(self, message: str, *, kind: str = "transient") -> None:
        super().__init__(message)
        self.kind = kind

    def __reduce__(self) -> tuple[object, ...]:  # keyword-only arguments do not survive the default
        return _rebuild_storage_error, (type(self), str(self), self.kind), self.__dict__  # with its notes


class CorruptError(StorageError, DataError):
    """The store delivers bytes that are not the dataset's, also when asked again. Its fault or the data's: either base
    catches it. ``kind`` is ``corrupt``.
    """

    def __init__(self, message: str, *, kind: str = "corrupt") -> None:
        super().__init__(message, kind=kind)


def _rebuild_storage_error(cls: type[StorageError], message: str, kind: str) -> StorageError:
    return cls(message, kind=kind)


class WorkerError(StreamshardError, RuntimeError):
    """A loader's worker process ended, or failed with something that cannot be sent. The state is that of the last batch."""


class StateError(StreamshardError, ValueError):
    """A saved state does not fit this dataset, these settings or this topology."""
