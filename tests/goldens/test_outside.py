"""What users see is what it was; see :mod:`tests.goldens.outside`."""

from tests.goldens import outside


def test_nothing_that_users_see_changes_by_accident():
    texts = outside.made() | outside.submitted()
    differing = [found for name, text in texts.items() if (found := outside.difference(name, text))]
    assert not differing, "\n\n".join([*differing, "on purpose: python -m tests.goldens.outside --write"])
    assert sorted(texts) == sorted(path.name for path in outside.FOLDER.glob("*.txt"))
