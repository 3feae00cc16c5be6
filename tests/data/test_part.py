"""What one of several processes reads of a batch."""

import numpy as np
import pytest

from octavo.data import Layout
from octavo.data.corpus import Corpus
from octavo.data.rows import as_numbers
from octavo.data.synthetic import Fixed, Language


def corpus(layout: Layout) -> Corpus:
    stream = np.random.default_rng(0).integers(0, 50, 1000).astype(np.uint8)
    return Corpus(stream, layout, eos=0, bos=0, vocab_size=50, decode=as_numbers, details={})


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    "make", [corpus, lambda layout: Language(layout, "train"), lambda layout: Fixed(layout, "train")]
)
def test_parts_are_rows_of_the_batch(make, shuffle):
    data = make(Layout(batch_size=6, length=16, shuffle=shuffle, reuse=5, vocab_size=50))
    for index in (0, 3, 12):
        whole = data.batch(index)
        for start, stop in ((0, 6), (2, 4), (5, 6)):
            for name, rows in data.part(index, start, stop).items():
                np.testing.assert_array_equal(rows, whole[name][start:stop])


def test_rows_beyond_the_batch():
    data = Fixed(Layout(batch_size=6, length=16), "train")
    with pytest.raises(ValueError, match="rows 4 to 7 are not within a batch of 6"):
        data.part(0, 4, 7)
