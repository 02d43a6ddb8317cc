"""Token counts share kernels: the one place where a count becomes a compile-time capacity."""


def token_bucket(num_tokens: int, smallest: int = 8) -> int:
    """The least power of two that is at least `num_tokens` and `smallest`.

    A kernel is compiled for the bucket and told the count at run time, so that 1 to 8 tokens share
    one kernel, 9 to 16 the next, and 16,384 token counts need 12 kernels.

    Raises:
        ValueError: `num_tokens` is not positive; an op returns before it asks for a kernel.
    """
    if num_tokens < 1:
        raise ValueError(
            f"num_tokens={num_tokens}, wanted at least 1: empty batches need no kernel"
        )
    return max(smallest, 1 << (num_tokens - 1).bit_length())
