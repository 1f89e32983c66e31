"""Block hashes: the chained keys of a request's prefixes, the same for KV blocks, states and offload tiers."""

from hashlib import blake2b

from bateleur.runner.utils.arrays import Int32s

KEY_BYTES = 16


class PrefixKeys:
    """Keys of the prefixes of one request that end at multiples of `block_size` tokens.
    A key is the digest of the key before it and the tokens of its block, so equal keys mean equal prefixes. It has 128
    bits, so a collision by chance is practically impossible. Keys also name the files of the disk tier.
    """

    __slots__ = ("_keys", "block_size", "root")

    def __init__(self, block_size: int, root: bytes = b"") -> None:
        self.block_size, self.root = block_size, root
        self._keys: list[bytes] = []

    def of(self, token_ids: Int32s, num_tokens: int) -> bytes:
        """Return the key of the first `num_tokens` of `token_ids`, a positive multiple of the block size.
        Tokens that were passed to earlier calls must not have changed.
        """
        index, rest = divmod(num_tokens, self.block_size)
        assert index > 0
        assert rest == 0
        return self.upto(token_ids, index)[index - 1]

    def blocks(self, token_ids: Int32s, first: int, end: int) -> list[bytes]:
        """Return the keys of the prefixes that end with the blocks `first` to `end - 1`."""
        return self.upto(token_ids, end)[first:end]

    def blocks_with_lookahead(self, token_ids: Int32s, first: int, end: int) -> list[bytes]:
        """Return the keys of `blocks`, each with the token after its block appended; this token must be known.
        A drafter's keys and values at a position depend on the token after it (vLLM RFC #50438). A block is therefore
        reused only if the same token follows.
        """
        size = self.block_size
        following = token_ids[(first + 1) * size : end * size + 1 : size].astype("<i4").tobytes()
        keys = self.upto(token_ids, end)[first:end]
        assert len(following) == 4 * len(keys)
        return [key + following[4 * i : 4 * i + 4] for i, key in enumerate(keys)]

    def upto(self, token_ids: Int32s, end: int) -> list[bytes]:
        """Return the list of all keys so far, at least those of the first `end` blocks. Slice it; do not change it."""
        keys, size = self._keys, self.block_size
        for block in range(len(keys), end):
            tokens = token_ids[block * size : (block + 1) * size]
            assert tokens.size == size, "blocks are full"
            before = keys[-1] if keys else self.root
            keys.append(blake2b(before + tokens.astype("<i4").tobytes(), digest_size=KEY_BYTES).digest())
        return keys
