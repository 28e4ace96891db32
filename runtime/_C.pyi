"""The compiled loader (csrc/bindings/module.cpp). Pointers and streams are integers, 0 for null."""

import os
from collections.abc import Sequence

def is_capturing(stream: int) -> bool:
    """Return whether launches on the stream are being captured into a CUDA graph."""

def capture_of(stream: int) -> int:
    """Return the id of the capture that the stream is in, unique in the process; 0 for none."""

class GraphHold:
    """Tells whether the graph that a stream is being captured into may still be run.

    Attributes:
        is_alive: until the graph, all that was instantiated of it, and their launches are gone;
            also of a capture that failed.

    Raises:
        RuntimeError: when the stream is not being captured, or in the driver's words.
    """

    def __init__(self, stream: int) -> None: ...
    @property
    def is_alive(self) -> bool: ...

class Library:
    """A loaded kernel library, which says itself what its launch takes (csrc/common/fields.h).

    Args:
        path: of the file, by which errors name it.
        opened: another path to the file, by which it is loaded; `path` by default.

    Attributes:
        path: of the file.
        fields: of a launch, in the order of the struct: a letter for each number that is passed, p
            for an address, q, i and I for integers of 64, 32 and 32 unsigned bits, f for fp32. A
            field of several letters takes a tuple.

    Raises:
        RuntimeError: naming the file, when it cannot be loaded, is no kernel library, or was made
            for another version of this module.
    """

    def __init__(
        self, path: str | os.PathLike[str], opened: str | os.PathLike[str] = ...
    ) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def fields(self) -> dict[str, str]: ...
    def prepare(self) -> None:
        """Set attributes of the kernels for the current device; may be repeated.

        Raises:
            RuntimeError: with CUDA's words.
        """

    def launch(self, *, stream: int, **fields: int | float | Sequence[int]) -> None:
        """Launch on a stream. Fields that are optional are zero or null unless passed.

        Raises:
            TypeError: naming the library and the field: one that is missing or that it has not, or
                a value of another type.
            ValueError: likewise, for a value that does not fit.
            RuntimeError: with CUDA's words.
        """

    def workspace_bytes(self, **capacities: int) -> int:
        """Return the bytes of workspace that launches within these capacities need.

        Raises:
            TypeError, ValueError: as of `launch`.
            RuntimeError: when its launches take none, or with CUDA's words.
        """
