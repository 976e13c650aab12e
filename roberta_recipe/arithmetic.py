"""Rounding of whole numbers."""


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `number`."""
    return -(-number // multiple) * multiple
