"""What can go wrong in a way that the reader of the message can mend: one line each."""


class NcdwfError(Exception):
    """The base of all errors below. The command line prints the line and exits with code 2."""


class InputError(NcdwfError, ValueError):
    """A value, a name or a file from outside is not acceptable; the message says what is."""


class StorageError(NcdwfError, OSError):
    """A file could not be written or read back as it was written."""


class NonFiniteError(NcdwfError, ArithmeticError):
    """A loss term or a gradient became NaN or infinite; nothing of that step was kept."""


def shown(value: object) -> str:
    """Return a value for a message: on one line that is not too long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:79]}…"


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
