"""The pool and the names of its blocks."""

from __future__ import annotations

from twostroke.kv.addresses import BlockHasher, Name
from twostroke.kv.blocks import BlockPool


def test_an_equal_name_is_not_proof():
    pool = BlockPool(4)
    block = pool.take()
    assert pool.publish(block, Name(0, b"x"), (1, 2))
    assert pool.find(Name(0, b"x"), (1, 2)) == block
    assert pool.find(Name(0, b"x"), (1, 3)) is None
    assert pool.find(Name(1, b"x"), (1, 2)) is None


def test_the_least_recently_used_block_is_evicted_first():
    pool = BlockPool(3)
    blocks = [pool.take() for _ in range(3)]
    for number, block in enumerate(blocks):
        pool.publish(block, Name(0, bytes([number])), (number,))
    for block in (blocks[1], blocks[0], blocks[2]):
        pool.release(block)
    pool.hold(blocks[1])
    pool.release(blocks[1])  # used again: now the youngest
    assert [pool.take() for _ in range(3)] == [blocks[0], blocks[2], blocks[1]]
    assert not pool.by_name
    pool.check()


def test_without_caching_a_released_block_is_forgotten():
    pool = BlockPool(2, keep_cached=False)
    block = pool.take()
    pool.publish(block, Name(0, b"x"), (1,))
    pool.release(block)
    assert pool.find(Name(0, b"x"), (1,)) is None
    assert len(pool.free) == 2


def test_names_depend_on_everything_before_and_on_the_salt_and_the_key():
    def chain(tokens, salt=b"", key=b"k", model="m"):
        names: list[bytes] = []
        BlockHasher(model, key).extend(names, tokens, salt, len(tokens) // 16)
        return names

    base = chain(list(range(48)))
    assert len(base) == 3
    assert chain(list(range(32))) == base[:2]
    changed = chain([99, *range(1, 48)])
    assert not set(changed) & set(base)
    for other in (
        chain(list(range(48)), salt=b"t"),
        chain(list(range(48)), key=b"q"),
        chain(list(range(48)), model="n"),
    ):
        assert not set(other) & set(base)
