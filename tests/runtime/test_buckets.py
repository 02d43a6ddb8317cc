import pytest

from k3jax.runtime.buckets import token_bucket


def test_buckets_hold_every_count_and_are_few():
    counts = range(1, 16385)
    buckets = [token_bucket(count) for count in counts]
    assert all(bucket >= count for bucket, count in zip(buckets, counts, strict=True))
    assert all(
        bucket < 2 * count for bucket, count in zip(buckets, counts, strict=True) if count > 8
    )
    assert len(set(buckets)) == 12


def test_bucket_edges():
    wanted = {1: 8, 8: 8, 9: 16, 16: 16, 17: 32, 4096: 4096, 4097: 8192}
    assert {count: token_bucket(count) for count in wanted} == wanted
    assert token_bucket(3, smallest=1) == 4


def test_empty_batch_is_refused():
    with pytest.raises(ValueError, match="num_tokens=0"):
        token_bucket(0)
