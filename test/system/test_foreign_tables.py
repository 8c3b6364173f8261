"""A commit that is refused commits nothing on other servers either: what postgres_fdw did there is rolled back with it.

postgres_fdw commits on the far side when the near side is about to commit, and registers for that when a session uses a
foreign table for the first time.
"""
import psycopg2
import pytest

from conftest import cluster, make_database, run


def make_far(db):
    """public.far, a foreign table of this very database. Returns how many rows have been committed there."""
    host, port = db.server.directory, db.server.port
    db.sql(f"""CREATE EXTENSION postgres_fdw SCHEMA public;
      CREATE TABLE public.far_rows (id int);
      CREATE SERVER loop FOREIGN DATA WRAPPER postgres_fdw OPTIONS (host '{host}', port '{port}', dbname '{db.name}');
      CREATE USER MAPPING FOR postgres SERVER loop OPTIONS (user 'postgres');
      CREATE FOREIGN TABLE public.far (id int) SERVER loop OPTIONS (schema_name 'public', table_name 'far_rows')""")
    return lambda: db.value("SELECT count(*) FROM public.far_rows")


@pytest.fixture
def far(db):
    return make_far(db)


INSERT = "INSERT INTO public.far VALUES (1)"
BEGUN = ["SELECT idem_begin('k', '\\x01'::bytea)"]
LOST = ["SET LOCAL retrysafe.on_lost_claim = 'error'", "SAVEPOINT s", *BEGUN, "ROLLBACK TO s"]
ORDERS = {"first": lambda claim: [*claim, INSERT], "last": lambda claim: [INSERT, *claim],
          "between": lambda claim: [INSERT, *claim, INSERT]}


@pytest.mark.parametrize("earlier", [None, INSERT, BEGUN[0]], ids=["new", "foreign", "claimed"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("claim, code", [(BEGUN, "RS008"), (LOST, "RS015")], ids=["begun", "lost"])
def test_a_refused_commit(db, far, claim, code, order, earlier):
    """Whether the key or the foreign table came first, and whatever the session did before."""
    c = db.connect(autocommit=False)
    if earlier:
        run(c, earlier)
        c.rollback()
    for statement in ORDERS[order](claim):
        run(c, statement)
    with pytest.raises(psycopg2.Error) as refused:
        c.commit()
    assert refused.value.pgcode == code
    assert far() == 0
    run(c, BEGUN[0])
    run(c, INSERT)
    run(c, "SELECT idem_complete('k')")
    c.commit()
    assert far() == 1


@pytest.mark.parametrize("end", ["", "COMMIT;"], ids=["statement", "procedure"])
def test_a_refused_statement(db, far, end):
    """Without a transaction block, in a session that has used a foreign table before."""
    c = db.connect()
    run(c, "SELECT FROM public.far")
    with pytest.raises(psycopg2.Error) as refused:
        run(c, f"DO $$ BEGIN PERFORM {BEGUN[0].removeprefix('SELECT ')}; {INSERT}; {end} END $$")
    assert refused.value.pgcode == "RS008"
    assert far() == 0


def test_a_session_that_loaded_the_library_itself():
    with cluster("shared_preload_libraries = ''") as server:
        db = make_database(server)
        test_a_refused_commit(db, make_far(db), BEGUN, "RS008", "first", None)
