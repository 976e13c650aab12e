"""Whole-number arithmetic that several modules need."""


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `number`."""
    return -(-number // multiple) * multiple


def largest_divisor(number: int, at_most: int) -> int:
    """The largest divisor of `number` that is not above `at_most`, which is at least 1."""
    return max(size for size in range(1, at_most + 1) if number % size == 0)
