"""The samples that a run of megaburn on a .txt file reads, byte by byte a token, without megaburn: a peer trains on the
same ones in the same order. Formulas are those of `megaburn-mesh/src/rng.rs`, `megaburn-data/src/permutation.rs` and
`dataset.rs`; a run's checkpoint says how many samples there are, which is compared."""

import math, pathlib, xxhash

MASK = (1 << 32) - 1
DATA_ORDER = 3  # the purpose's number, counted from 1
ROUNDS = 8


def philox4x32_10(counter, key):
    c, k = list(counter), list(key)
    for _ in range(10):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(q >> 32) ^ c[1] ^ k[0], q & MASK, (p >> 32) ^ c[3] ^ k[1], p & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


# Random123's known answer.
assert philox4x32_10([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


class Order:
    """`Permutation` of an epoch."""

    def __init__(self, n, seed, epoch):
        of_purpose = xxhash.xxh3_64_intdigest(seed.to_bytes(8, "little"), seed=DATA_ORDER)
        key = xxhash.xxh3_64_intdigest(b"train", seed=of_purpose)
        self.key, self.stream = (key & MASK, key >> 32), (epoch & MASK, epoch >> 32)
        self.n, root = n, math.isqrt(n)
        self.a = max(root + (root * root < n), 1)
        self.b = -(-n // self.a)

    def bits(self, index):
        block = index // 4
        return philox4x32_10((block & MASK, block >> 32, *self.stream), self.key)[index % 4]

    def below(self, index, bound):
        return ((self.bits(2 * index) | self.bits(2 * index + 1) << 32) * bound) >> 64

    def network(self, place):
        left, right = divmod(place, self.b)
        for r in range(ROUNDS):
            if r % 2 == 0:
                left = (left + self.below(right * ROUNDS + r, self.a)) % self.a
            else:
                right = (right + self.below(left * ROUNDS + r, self.b)) % self.b
        return left * self.b + right

    def at(self, index):
        place = self.network(index)
        while place >= self.n:
            place = self.network(place)
        return place


class Samples:
    """`seq_len + 1` tokens by the number of a sample, counted over the whole run."""

    def __init__(self, path, seq_len, seed, validation_fraction):
        text = pathlib.Path(path).read_bytes()
        # Rust rounds halves away from zero.
        self.tokens = text[: len(text) - math.floor(len(text) * validation_fraction + 0.5)]
        self.seq_len, self.seed, self.orders = seq_len, seed, {}
        self.num = (len(self.tokens) - 1) // seq_len

    def __getitem__(self, number):
        epoch, index = divmod(number, self.num)
        if epoch not in self.orders:
            self.orders[epoch] = Order(self.num, self.seed, epoch)
        start = self.orders[epoch].at(index) * self.seq_len
        return list(self.tokens[start : start + self.seq_len + 1])
