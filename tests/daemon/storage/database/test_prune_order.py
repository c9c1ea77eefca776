"""The order in which images are pruned."""

from hypothesis import given
from hypothesis import strategies as st

from daemon.storage.database.prune import KeptImage, images_to_prune, rank


def a_kept_image(inspection_id=1, verdict="pass", size_bytes=100, **fields):
    values = {"path": f"images/{inspection_id}.jpg", "is_reviewed": False} | fields
    return KeptImage(inspection_id, size_bytes=size_bytes, verdict=verdict, **values)


def ids(images):
    return [image.inspection_id for image in images]


def test_passed_images_go_first_then_unknown_then_evidence_the_oldest_first_within_each():
    images = [
        a_kept_image(1, "review"),
        a_kept_image(5, "pass"),
        a_kept_image(3, "fail"),
        a_kept_image(4, "unknown"),
        a_kept_image(2, "pass"),
        a_kept_image(6, "pass", is_reviewed=True),
    ]
    assert ids(images_to_prune(images, excess=10**9)) == [2, 5, 4, 1, 3, 6]


@given(
    st.lists(st.tuples(st.sampled_from(("pass", "unknown", "fail", "review")), st.booleans()), max_size=30),
    st.integers(0, 4000),
)
def test_no_image_goes_while_one_of_less_worth_stays_and_no_more_than_the_excess_needs(kinds, excess):
    images = [a_kept_image(n, verdict, is_reviewed=reviewed) for n, (verdict, reviewed) in enumerate(kinds)]
    gone = images_to_prune(images, excess=excess)
    stays = [image for image in images if image not in gone]
    worth = [(rank(image), image.inspection_id) for image in images]
    assert all((rank(g), g.inspection_id) < (rank(s), s.inspection_id) for g in gone for s in stays), worth
    assert sum(image.size_bytes for image in gone) >= min(excess, 100 * len(images))
    assert not gone or sum(image.size_bytes for image in gone[:-1]) < excess
