"""Kinds of argument that several verbs take."""

import argparse


def integers(text: str) -> list[int]:
    """Whole numbers joined by commas."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of whole numbers such as 1,8,64"
        ) from None


def seconds(text: str) -> float:
    """A time, 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds such as 0.01")
    return value
