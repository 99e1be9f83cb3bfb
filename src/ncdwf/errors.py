"""What can go wrong in a way that the reader of the message can mend: one line each."""

import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager

STEERING = ("Cc", "Cs", "Zl", "Zp")
"""Categories of characters that no name needs: control characters, bytes that are no text, ends of
lines. Joiners and wide spaces are letters of some scripts."""
TURNING = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""What makes text read in another direction than it is written."""


class NcdwfError(Exception):
    """The base of all errors below. The command line prints the line and exits with code 2."""


class InputError(NcdwfError, ValueError):
    """A value, a name or a file from outside is not acceptable; the message says what is."""


class InUseError(InputError):
    """Another process holds what only one may have."""


class StorageError(NcdwfError, OSError):
    """A file could not be written or read back as it was written."""


class NonFiniteError(NcdwfError, ArithmeticError):
    """A loss term, a gradient or an answer is NaN or infinite; nothing of it was kept."""


NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
"""What PyTorch says, on a GPU and on a CPU, where it has no error of its own."""


@contextmanager
def enough_memory() -> Iterator[None]:
    """Turn the errors by which memory runs out into one line that says what needs less."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(s in str(error) for s in NO_MEMORY):
            raise
        raise InputError(
            "this needs more memory than there is; smaller batches (optim.batch_size), smaller "
            "pictures, fewer views or a smaller network need less"
        ) from error


def shown(value: object) -> str:
    """Return a value for a message: on one line that is not too long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:79]}…"


def printable(text: str, keep: str = "") -> str:
    r"""Return `text` with all that would steer a terminal or break a line written out.

    >>> print(printable("a\nb\x1b[2J"), printable("میخواهم 鳥　類"))
    a\nb\x1b[2J میخواهم 鳥　類
    """
    return "".join(
        repr(char)[1:-1] if _steers(char) and char not in keep else char for char in text
    )


def _steers(char: str) -> bool:
    return unicodedata.category(char) in STEERING or char in TURNING


def first_line(error: object) -> str:
    """Return what a foreign error says, on one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def counted(number: int, thing: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "class"), counted(1200, "class"), counted(0, "picture")
    ('1 class', '1,200 classes', '0 pictures')
    """
    plural = f"{thing}es" if thing.endswith("s") else f"{thing}s"
    return f"{number:,} {thing if number == 1 else plural}"
