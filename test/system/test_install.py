"""The extension and its library, each without the other."""
import psycopg2
import pytest

from conftest import run


def test_extension_is_there(db):
    assert db.value("SELECT extname FROM pg_extension WHERE extname = 'retrysafe'") == "retrysafe"


def test_the_library_without_the_extension(server):
    """A function of the library that somebody declared by hand tells what is missing."""
    connection = server.connect("template1")
    try:
        run(connection, "CREATE FUNCTION pg_temp.forget(text, text) RETURNS boolean LANGUAGE c"
                        " AS '$libdir/retrysafe', 'retrysafe_idem_forget'")
        with pytest.raises(psycopg2.Error) as error:
            run(connection, "SELECT pg_temp.forget('k', '')")
        assert error.value.pgcode == "RS301"
        assert "CREATE EXTENSION retrysafe" in error.value.diag.message_hint
    finally:
        connection.close()


def test_events_of_a_function_destination_are_not_handed_out(db):
    db.sql("CREATE FUNCTION public.handle(event jsonb) RETURNS void LANGUAGE sql AS ''")
    db.sql("SELECT outbox_create_destination('f', 'function', '{\"function\": \"public.handle\"}')")
    with pytest.raises(psycopg2.Error) as error:
        db.sql("SELECT * FROM outbox_fetch('f')")
    assert error.value.pgcode == "RS217"
