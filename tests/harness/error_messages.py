"""The messages of errors that rank functions return to their tests."""

from __future__ import annotations

from collections.abc import Callable


def error_message(run: Callable[[], object]) -> str:
    """Returns the message of the RuntimeError of ``run``, or an empty string."""
    try:
        run()
    except RuntimeError as error:
        return str(error)
    return ""
