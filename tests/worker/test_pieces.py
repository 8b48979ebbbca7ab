"""The pieces of a gradient that comes from a device."""

import math
import random

from p3.frontend.pieces import pieces


def test_pieces_cover_the_array_once_and_double():
    seed = random.randrange(1 << 32)
    generator = random.Random(seed)
    assert list(pieces(0, 5)) == []
    for _ in range(200):
        elements, first = generator.randrange(1, 10**6), generator.randrange(1, 10**5)
        cut = list(pieces(elements, first))
        assert [begin for begin, _ in cut] == [0, *(end for _, end in cut[:-1])] and cut[-1][1] == elements, seed
        assert cut[0][1] == min(first, elements), seed
        assert len(cut) <= 2 + math.log2(max(1, elements / first)), seed
