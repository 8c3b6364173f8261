"""The harness itself: a server starts, and the extension can be created."""


def test_extension_is_there(db):
    assert db.value("SELECT extname FROM pg_extension WHERE extname = 'retrysafe'") == "retrysafe"
