"""Images in a prompt: runs of one negative content id."""

import numpy as np
import pytest

from tierkv.hooks.prompt_tokens import as_ids, inside_media, media_in


def spans(tokens):
    return [(each.start, each.length) for each in media_in(as_ids(tokens))]


def test_runs_of_one_negative_id_are_images():
    assert spans([]) == []
    assert spans([1, 2, 3]) == []
    assert spans([1, -7, -7, 2, -7, -9, -9]) == [(1, 2), (4, 1), (5, 2)]
    assert spans([-5, -5]) == [(0, 2)]


def test_the_content_hash_is_the_id():
    identity = -(2**60) + 17
    assert media_in(as_ids([1, identity]))[0].content_hash == identity.to_bytes(8, "little", signed=True)


def test_where_an_image_is_cut():
    ids = as_ids([1, -7, -7, 2, -9])
    assert [inside_media(ids, position) for position in range(6)] == [False, False, True, False, False, True]


def test_only_64_bit_integers_are_tokens():
    assert as_ids([2**62, -(2**62)]).dtype == np.int64
    with pytest.raises(OverflowError):
        as_ids([2**64])
