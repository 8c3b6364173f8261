"""What the documentation says is compared with what is there, and its examples are run."""
import concurrent.futures
import json
import os
import re
import shutil
import signal
import subprocess

import pytest

from conftest import TOP, Database, eventually, make_database, run

# Members of the extension that are not for users: views and other functions call them.
INTERNAL = {"outbox_recorded_at", "outbox_passed_position", "outbox_redacted_options", "outbox_options_of_kind", "outbox_built_in_kinds",
            "outbox_list_workers", "outbox_only_the_owner_writes", "retrysafe_apply_grant", "retrysafe_apply_revoke",
            "retrysafe_objects_of", "retrysafe_check_access", "retrysafe_holds"}
# Settings of test builds only.
TEST_SETTINGS = {"retrysafe.fault_points"}
MANUAL = ["README.md", "README.zh-CN.md", *(f"docs/{path.name}" for path in sorted((TOP / "docs").glob("*.md")))]


def text_of(name):
    return (TOP / name).read_text()


def section(text, title):
    """The part of a page from the heading of that title to the next heading of its level or a higher one."""
    # In examples a line that begins with # is a comment.
    prose = re.sub(r"^```.*?^```", lambda block: re.sub(r"[^\n]", " ", block[0]), text, flags=re.M | re.S)
    start = re.search(rf"^(#+) {re.escape(title)}$", prose, re.M)
    assert start, f"there is no heading {title!r}"
    end = re.compile(rf"^#{{1,{len(start[1])}}} ", re.M).search(prose, start.end())
    return text[start.end():end.start() if end else None]


def headings(text, level):
    return re.findall(rf"^{'#' * level} (\S+)$", text, re.M)


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def table_as_it_is(text):
    """The rows of the first table, without its head."""
    lines = re.search(r"(?:^\|.*\n)+", text, re.M)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def table(text):
    """The same; backquotes are taken off."""
    return [[cell.replace("`", "") for cell in row] for row in table_as_it_is(text)]


# --- reference.md -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference():
    return text_of("docs/reference.md")


@pytest.fixture(scope="module")
def catalog(server):
    database = make_database(server)
    yield database
    admin = server.connect()
    run(admin, f'DROP DATABASE "{database.name}" WITH (FORCE)')
    admin.close()


def members(database, catalog, column):
    return database.sql(f"""
        SELECT {column} FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid AND e.extname = 'retrysafe'
          JOIN {catalog} c ON c.oid = d.objid
         WHERE d.deptype = 'e' AND d.classid = '{catalog}'::regclass AND d.refclassid = 'pg_extension'::regclass""")


def signatures(database):
    """Every function for users as the reference writes it: name(arguments) → result."""
    rows = members(database, "pg_proc", "proname, pg_get_function_arguments(c.oid), pg_get_function_result(c.oid)")
    for name, arguments, result in rows:
        if name in INTERNAL:
            continue
        out = re.findall(r"OUT (\w+ \w+)", arguments)
        arguments = re.sub(r",? ?OUT .*", "", arguments)
        if result is None:  # a procedure
            yield f"{name}({re.sub(r'^IN |(?<=, )IN ', '', arguments)})"
            continue
        yield f"{name}({arguments}) → {'(' + ', '.join(out) + ')' if out else result}"


def plain(signature):
    """Without casts and long type names."""
    signature = re.sub(r"::[a-z ]+(\[\])?", "", signature)
    return signature.replace("timestamp with time zone", "timestamptz").replace("TABLE (", "TABLE(")


def test_every_function_is_in_the_reference_as_it_is(catalog, reference):
    written = set()
    for block in blocks(reference, "text"):
        for signature in re.split(r"\n(?=\S)", block.strip()):
            signature = re.sub(r"\s+", " ", signature)
            # Durations are written as people say them.
            written.add(re.sub(r"(?<=interval DEFAULT )'([^']+)'",
                               lambda m: f"'{catalog.value('SELECT %s::interval::text', m[1])}'", signature))
    assert written == {plain(signature) for signature in signatures(catalog)}


def test_every_function_has_a_heading(catalog, reference):
    names = {name for name, in members(catalog, "pg_proc", "proname")} - INTERNAL
    views = {name for name, in members(catalog, "pg_class", "relname")
             if catalog.value("SELECT relkind FROM pg_class WHERE relname = %s", name) == "v"}
    written = [title for title in headings(reference, 3) if "_" in title]
    assert sorted(written) == sorted(names | views)


def test_every_view_is_in_the_reference_with_its_columns(catalog, reference):
    views = section(reference, "Views")
    found = catalog.sql("""
        SELECT c.relname, array_agg(a.attname::text ORDER BY a.attnum)
          FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
          JOIN pg_depend d ON d.objid = c.oid AND d.deptype = 'e' AND d.classid = 'pg_class'::regclass
         WHERE c.relkind = 'v' GROUP BY 1""")
    assert set(headings(views, 3)) == {name for name, _ in found}
    for name, columns in found:
        assert [row[0] for row in table(section(views, name))] == columns, name


@pytest.mark.parametrize("view", ["outbox_status", "ring_status", "outbox_workers"])
def test_every_state_is_in_the_reference(catalog, reference, view):
    if view == "outbox_workers":
        code = text_of("src/runtime/api.cpp")
        states = re.findall(r'(?:return|\?|:) "([a-z ]+)"', code[code.index("state_of("):])
        states.remove("unknown")
    else:
        definition = catalog.value(f"SELECT pg_get_viewdef('{view}'::regclass)")
        states = re.findall(r"(?:THEN|ELSE) '([a-z ]+)'", re.search(r"CASE((?:(?!CASE).)*)END AS state,", definition, re.S)[1])
    written = dict(row[:2] for row in table_as_it_is(section(section(reference, "Views"), view)))["`state`"]
    assert set(re.findall(r"`([a-z ]+)`", written)) == set(states)


def in_units(number, unit):
    """As the server shows a setting: in the largest unit that divides it."""
    sizes = {"s": [("d", 86400), ("h", 3600), ("min", 60), ("s", 1)],
             "ms": [("h", 3600000), ("min", 60000), ("s", 1000), ("ms", 1)],
             "MB": [("GB", 1024), ("MB", 1)], "B": [("MB", 1048576), ("kB", 1024), ("B", 1)], None: [("", 1)]}[unit]
    number = int(number)
    return next(f"{number // size}{name}" for name, size in sizes if number % size == 0) if number else "0"


def test_every_setting_is_in_the_reference_as_it_is(catalog, reference):
    connection = catalog.connect()
    run(connection, "LOAD 'retrysafe'")
    who = {"superuser": "superuser", "user": "everybody", "sighup": "reload"}
    expected = {}
    for name, context, vartype, boot, low, high, unit in run(connection, """
            SELECT name, context, vartype, boot_val, min_val, max_val, unit FROM pg_settings WHERE name LIKE 'retrysafe.%'"""):
        if name in TEST_SETTINGS:
            continue
        span = ""
        if vartype == "integer":
            boot, bounded = in_units(boot, unit), high != "2147483647"
            span = f"{in_units(low, unit)} to {in_units(high, unit)}" if bounded else f"from {in_units(low, unit)}"
        expected[name] = (boot or "empty", span, who[context])
    written = {row[0]: tuple(row[2:]) for row in table(section(reference, "Settings"))}
    assert written == expected


def test_every_error_code_is_in_the_reference(reference):
    codes = re.findall(r'ErrorCode k\w+\{"(\w+)"\}', text_of("src/core/error_codes.hpp"))
    assert [row[0] for row in table(section(reference, "Error codes"))] == codes


def test_the_accesses_are_what_they_are(catalog, reference):
    for access, _, names in table(section(reference, "retrysafe_grant")):
        found = {name for name, in catalog.sql(
            "SELECT DISTINCT proname::text FROM retrysafe_objects_of(%s) o JOIN pg_proc p ON p.oid = o.object"
            " WHERE o.kind = 'ROUTINE'", access)}
        if access in ("write", "consume", "relay"):
            assert set(names.split(", ")) == found


@pytest.mark.parametrize("page", MANUAL)
def test_no_page_names_what_is_not_there(catalog, page):
    text = text_of(page)
    codes = set(re.findall(r'"(RS\d{3})"', text_of("src/core/error_codes.hpp")))
    assert set(re.findall(r"\bRS\d{3}\b", text)) <= codes
    functions = {name for name, in members(catalog, "pg_proc", "proname::text")}
    relations = {name for name, in members(catalog, "pg_class", "relname::text")}
    connection = catalog.connect()
    run(connection, "LOAD 'retrysafe'")
    settings = {name.split(".")[1] for name, in run(connection, "SELECT name FROM pg_settings WHERE name LIKE 'retrysafe.%'")}
    called = set(re.findall(r"\b((?:idem|inbox|outbox|retrysafe)_[a-z_]+)\(", text))
    assert called <= functions
    files = {"so", "control", "git"}
    assert set(re.findall(r"\bretrysafe\.([a-z_]+)", text)) <= functions | relations | settings | files


@pytest.mark.parametrize("page", MANUAL)
def test_links_lead_somewhere(page):
    def anchors(text):
        titles = re.findall(r"^#+ (.+)$", text, re.M)
        return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}

    folder = (TOP / page).parent
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text_of(page), flags=re.S)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (folder / path).resolve() if path else TOP / page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file.read_text()), target


def test_architecture_leads_to_every_part():
    text = text_of("docs/architecture.md")
    for page in (TOP / "src").rglob("README.md"):
        assert f"](../{page.relative_to(TOP)})" in text


def test_guarantees_names_tests_that_exist():
    text = text_of("docs/guarantees.md")
    tests = "\n".join(path.read_text() for folder in ("system", "system/brokers", "sinks") for path in (TOP / "test" / folder).glob("*.py"))
    for name in set(re.findall(r"\btest_\w+\b(?!\.py)", text)):
        assert f"def {name}(" in tests, name
    for path in set(re.findall(r"`((?:test|sql)/[\w/]+\.\w+)`", text)):
        assert (TOP / path).exists(), path


# --- destinations.md --------------------------------------------------------------------------------------------


def test_every_kind_is_in_the_manual(catalog, reference):
    kinds = {kind for kind, in catalog.sql("SELECT kind FROM outbox_built_in_kinds()")}
    page = text_of("docs/destinations.md")
    assert {re.match(r"\[(\w+)\]", row[0])[1] for row in table(page)} == kinds
    measured = {row[0] for row in table(section(page, "Events per second"))}
    assert measured == kinds - {"function", "pull"}
    parameters = dict(row[:2] for row in table(section(reference, "outbox_create_destination")))
    assert kinds <= set(re.findall(r"\w+", parameters["kind"]))


def test_every_type_of_options_is_in_the_manual(reference):
    types = re.findall(r'\{k\w+, "(\w+)"\}', text_of("src/core/option_list.cpp"))
    members = dict(table(section(reference, "outbox_register_kind")))
    assert re.findall(r"\w+", members["type"].split(";")[0].replace(" or ", " ")) == types


def milliseconds(text):
    number, unit = re.fullmatch(r"(\d+)([a-z]+)", text).groups()
    return int(number) * {"ms": 1, "s": 1000, "min": 60000, "h": 3600000}[unit]


def test_every_option_is_in_the_manual_as_it_is(catalog):
    page = text_of("docs/destinations.md")
    for kind, in catalog.sql("SELECT DISTINCT kind FROM outbox_kind_options"):
        expected = {}
        for option, kind_of_value, required, default, low, high, choices in catalog.sql(
                'SELECT option, type, required, "default", min, max, choices FROM outbox_kind_options'
                " WHERE kind = %s AND option IS NOT NULL", kind):
            number = int if kind_of_value in ("integer", "duration") else str
            span = choices.split("|") if choices else [low, high] if low is not None else None
            default = "required" if required else None if default is None else number(default)
            expected[option] = (kind_of_value, default, span)
        written = {}
        part = section(page, kind)
        for option, kind_of_value, default, span, *_ in table(section(part, "Options")) if expected else []:
            value = milliseconds if kind_of_value == "duration" else int
            if span.endswith(" bytes"):
                ends = [int(end) for end in span.removesuffix(" bytes").split(" to ")]
                span = [ends[0], ends[-1]]
            elif kind_of_value in ("integer", "duration"):
                span, default = [value(end) for end in span.split(" to ")], default if default in ("", "required") else value(default)
            elif kind_of_value == "enum":
                span = span.split(", ")
            written[option] = (kind_of_value, None if default == "" else default, span or None)
        assert written == expected, kind


# --- relay.md ---------------------------------------------------------------------------------------------------


def test_every_option_of_the_relay_is_in_its_page():
    page = section(text_of("docs/relay.md"), "Command line")
    shown = subprocess.run([TOP / "retrysafe-relay", "--help"], capture_output=True, text=True, check=True).stdout
    options = dict(re.findall(r"^ +(?:-\w, |    )--([a-z-]+)\S* +.*?(?:\(default (\S+)\))?$", shown, re.M))
    written = {name: default for names, _, default in table(page) for name in re.findall(r"--([a-z-]+)", names)}
    assert set(written) == set(options)
    assert {name: written[name] for name, default in options.items() if default} == {n: d for n, d in options.items() if d}


def test_every_count_of_the_relay_is_in_its_page():
    _, code = text_of("src/relay/relay.cpp").split('"statistics",')
    counts = re.findall(r'\{"(\w+)", ', code)
    logs = section(text_of("docs/relay.md"), "Logs")
    assert re.findall(r"`(\w+)`", logs[logs.index("`statistics`"):])[1:] == counts


def test_every_exit_status_of_the_relay_is_in_its_page():
    statuses = re.findall(r"^  kExit\w+ = (\d)", text_of("src/relay/relay.hpp"), re.M)
    assert [row[0] for row in table(section(text_of("docs/relay.md"), "Exit status"))] == statuses


# --- examples ---------------------------------------------------------------------------------------------------


class Newcomer:
    """Types what the README and docs/relay.md say, in order, on a server that is installed already. Whatever is in a code
    block is run, but for what UNTYPED names."""

    # Why not here: other tests run the scripts; packages, compilation and the service of the distribution are those of
    # the machine; what a login is for, the environment does here.
    UNTYPED = ("./scripts/", "apt-get install", "make && make install", "[ -e /etc/postgresql",
               "echo \"shared_preload_libraries", "service postgresql", "su - postgres", "psql shop", "systemctl enable")

    def __init__(self, server):
        self.server = server
        self.home = server.directory / "newcomer"
        self.names = {}
        self.database = None
        self.environment = os.environ | {
            "PGHOST": str(server.directory), "PGPORT": str(server.port), "PGUSER": "postgres", "HOME": str(self.home),
            "PATH": f"{server.bindir()}:{os.environ['PATH']}"}

    def __enter__(self):
        self.__exit__()
        self.home.mkdir()
        self.home.chmod(0o777)
        return self

    def __exit__(self, *_):
        if self.database:
            self.database.close()
        admin = self.server.connect()
        run(admin, "DROP DATABASE IF EXISTS shop WITH (FORCE)")
        for role in ("shop_app", "courier"):
            run(admin, f"DROP ROLE IF EXISTS {role}")
        admin.close()
        shutil.rmtree(self.home, ignore_errors=True)

    def sql(self, block):
        return psql(self.database, block)

    def shell(self, block):
        for line in block.splitlines():
            command = re.sub(r" +#.*", "", line)
            if command == "createdb shop":
                self.run(command)
                self.database = Database(self.server, "shop")
            elif not command.startswith(self.UNTYPED):
                self.run(command)

    def run(self, command):
        done = subprocess.run(["bash", "-euc", command], env=self.environment, text=True, capture_output=True, cwd=self.home,
                              timeout=60)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        return done.stdout

    def install(self):
        """Up to the first thing that is the user's own."""
        part = section(text_of("README.md"), "Install")
        for language, block in re.findall(r"^```(\w+)\n(.*?)^```", part, re.M | re.S):
            {"sql": self.sql, "sh": self.shell, "ini": self.is_set}[language](block)

    def is_set(self, block):
        assert self.run("psql -Atc 'SHOW shared_preload_libraries' postgres").strip() in block

    def handler(self):
        self.sql(blocks(section(text_of("README.md"), "In SQL"), "sql")[0])


@pytest.fixture
def newcomer(server):
    with Newcomer(server) as one:
        one.install()
        yield one


def psql(database, script):
    command = [database.server.bindir() / "psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", database.server.dsn(database.name)]
    done = subprocess.run([str(part) for part in command], input=script, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_sql_of_the_readme(newcomer):
    text = text_of("README.md")
    newcomer.sql("".join(blocks(text.replace(section(text, "Install"), ""), "sql")))  # in one session
    shop = newcomer.database
    assert shop.sql("SELECT place_order('demo-001', '{\"amount\": 12.50, \"customer\": \"ada\"}')") == [({"order_id": 1},)]
    assert shop.sql("SELECT count(*) FROM orders") == [(1,)]
    assert shop.sql("SELECT count(*) FROM retrysafe.outbox_events WHERE idempotency_key = 'demo-001'") == [(2,)]
    assert shop.sql("SELECT key FROM retrysafe.idempotency_records ORDER BY 1") == [("demo-001",), ("pay-7f3a",)]
    assert shop.sql("SELECT delivered FROM retrysafe.outbox_status WHERE name = 'search-index'") == [(3,)]


def test_both_readmes_have_the_same_code():
    def code(page):
        return [re.sub(r"\s*(--|#|//).*", "", block) for block in blocks(text_of(page), r"(?:sql|python|js|sh|ini)")]

    assert code("README.md") == code("README.zh-CN.md")


def test_both_readmes_say_the_same():
    """As far as names and links tell."""
    def links(page):
        return set(re.findall(r"\]\(((?!#|README)\S+?)\)", text_of(page)))

    def names(page):
        return set(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text_of(page), flags=re.M | re.S)))

    assert links("README.md") == links("README.zh-CN.md")
    assert names("README.md") == names("README.zh-CN.md")


def test_python_of_the_readme(newcomer, monkeypatch, capsys):
    newcomer.handler()
    shop = newcomer.database
    monkeypatch.setenv("PGPORT", str(shop.server.port))
    names = {}
    exec(blocks(section(text_of("README.md"), "In Python"), "python")[0], names)
    assert capsys.readouterr().out == "(201, {'order_id': 2})\n"

    def call(_):
        connection = shop.server.connect(shop.name, "shop_app", autocommit=False)
        try:
            return names["place_order"](connection, "demo-004", {"customer": "ada", "amount": 12.5})
        finally:
            connection.close()

    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(call, range(20)))
    assert sorted(status for status, _ in answers) == [200] * 19 + [201]
    assert {json.dumps(answer) for _, answer in answers} == {'{"order_id": 3}'}
    connection = shop.connect("shop_app", autocommit=False)
    assert names["place_order"](connection, "demo-004", {"customer": "bob", "amount": 1})[0] == 409
    assert shop.sql("SELECT count(*) FROM orders") == [(3,)]
    assert shop.sql("SELECT count(*) FROM retrysafe.outbox_events WHERE event_type = 'order.placed'") == [(3,)]
    names["connection"].close()


def test_node_of_the_readme(newcomer):
    if not shutil.which("node"):
        pytest.skip("node is not there")
    if subprocess.run(["node", "-e", "require('pg')"], capture_output=True).returncode != 0:
        pytest.skip("the module pg of Node.js is not there (NODE_PATH names where modules are)")
    newcomer.handler()
    script = blocks(section(text_of("README.md"), "In Node.js"), "js")[0] + """
        (async () => {
          const pool = new Pool({ host: 'localhost', database: 'shop', user: 'shop_app', max: 20 });
          const calls = Array.from({ length: 20 }, () => placeOrder(pool, 'demo-004', { customer: 'ada', amount: 12.5 }));
          const answers = await Promise.all(calls);
          answers.push(await placeOrder(pool, 'demo-004', { customer: 'bob', amount: 1 }));
          console.log(JSON.stringify(answers));
          await pool.end();
        })();"""
    done = subprocess.run(["node", "-"], input=script, text=True, capture_output=True, env=newcomer.environment, timeout=60)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    answers = json.loads(next(line for line in printed if line.startswith("[[")))
    assert "order_id" in "".join(line for line in printed if not line.startswith("[["))
    assert sorted(status for status, _ in answers) == [200] * 19 + [201, 409]
    assert len({json.dumps(answer) for status, answer in answers if status != 409}) == 1
    assert newcomer.database.sql("SELECT count(*) FROM orders") == [(3,)]


def test_the_relay_is_set_up_as_its_page_says(newcomer):
    """The commands, and the configuration file with the hosts and the file of this machine in place of its own."""
    newcomer.sql(blocks(section(text_of("README.md"), "Publish to a webhook"), "sql")[0])
    page = text_of("docs/relay.md")
    commands, = blocks(section(page, "Setting one up"), "sh")
    libraries = newcomer.database.value("SHOW dynamic_library_path")
    program = f"retrysafe-relay --library-path '{libraries}' --log-format json"
    newcomer.environment["PATH"] = f"{TOP}:{newcomer.environment['PATH']}"
    *others, last = re.sub(r"^retrysafe-relay\b", program, commands, flags=re.M).splitlines()
    for command in others:
        newcomer.shell(command)
    with subprocess.Popen(["bash", "-c", f"exec {last}"], env=newcomer.environment, cwd=newcomer.home, text=True,
                          stderr=subprocess.PIPE) as process:
        try:
            assert json.loads(process.stderr.readline())["message"] == "publishing"
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()
    newcomer.sql("SELECT retrysafe.outbox_create_destination('search', 'pull')")
    (newcomer.home / "key").write_text("sesame")
    file, = blocks(section(page, "Configuration file"), "ini")
    (newcomer.home / "conf").write_text(file.replace("host=db1,db2", "host=localhost").replace("/etc/retrysafe/billing.key", "key"))
    newcomer.run(f"{program} --config conf --check")


@pytest.mark.parametrize("page", ["docs/reference.md", "docs/destinations.md"])
def test_sql_of_the_manual(db, page):
    admin = db.server.connect()
    for role in ("shop_app", "courier"):
        run(admin, f"DROP ROLE IF EXISTS {role}")
    run(admin, "CREATE ROLE shop_app")
    run(admin, f"ALTER DATABASE {db.name} SET retrysafe.allowed_secret_directory = '/etc/retrysafe'")
    db.sql("CREATE TABLE public.payments (id bigint GENERATED ALWAYS AS IDENTITY, amount numeric)")
    if page == "docs/reference.md":
        db.sql("SELECT outbox_create_destination('search-index', 'pull')")
    script = "\n".join(blocks(text_of(page), "sql"))
    # A request that was begun is completed in the same transaction.
    psql(db, script.replace("SELECT outcome, response FROM idem_begin", "BEGIN;\nSELECT outcome, response FROM idem_begin")
         .replace("scope => 'payments');\n", "scope => 'payments');\nCOMMIT;\n"))
    db.sql("DROP OWNED BY shop_app")
    run(admin, "DROP ROLE shop_app")
    if page == "docs/destinations.md":
        # As a worker calls it.
        psql(db, "SET search_path = pg_catalog, pg_temp;"
                 "SELECT retrysafe.count_order('{\"payload\": {\"customer\": \"ada\"}}') FROM generate_series(1, 2);")
        assert db.sql("SELECT * FROM public.order_counts") == [("ada", 2)]
        db.sql("DROP OWNED BY courier")
        run(admin, "DROP ROLE courier")
    admin.close()


def test_settings_of_the_manual(server):
    """What destinations.md tells administrators to set is taken."""
    admin = server.connect()
    run(admin, "LOAD 'retrysafe'")
    for block in blocks(text_of("docs/destinations.md"), "ini"):
        for name, value in re.findall(r"^(\S+) = '(.*)'$", block, re.M):
            try:
                run(admin, f"ALTER SYSTEM SET {name} = %s", value)
            finally:
                run(admin, f"ALTER SYSTEM RESET {name}")
    admin.close()


def test_the_event_that_functions_get(db):
    db.sql("CREATE TABLE public.got (event jsonb)")
    db.sql("CREATE FUNCTION public.keep(event jsonb) RETURNS void LANGUAGE sql AS 'INSERT INTO public.got VALUES (event)'")
    db.sql("SELECT outbox_create_destination('d', 'function', '{\"function\": \"public.keep\"}')")
    db.sql("SELECT outbox_emit(NULL, 'e', 't', '{}', ordering_key => 'k')")
    eventually(lambda: db.value("SELECT count(*) FROM public.got") == 1)
    written = json.loads(blocks(section(text_of("docs/destinations.md"), "postgres"), "json")[0])
    assert db.value("SELECT event FROM public.got").keys() == written.keys()


def example(title, names):
    """Runs the Python example below a heading of destinations.md; its names come back."""
    exec(blocks(section(text_of("docs/destinations.md"), title), "python")[0], names)
    return names


def test_signature_check_of_the_manual():
    names = example("Checking the signature", {})
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    # The example of the Standard Webhooks reference libraries.
    headers = {"webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek", "webhook-timestamp": "1614265330",
               "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="}
    body = b'{"test": 2432232314}'
    assert names["is_genuine"](secret, headers, body, now=1614265330)
    assert names["is_genuine"](f"whsec_AAAA {secret}", headers, body, now=1614265330)
    assert not names["is_genuine"](secret, headers, body + b" ", now=1614265330)
    assert not names["is_genuine"](secret, headers, body, now=1614265330 + 301)
    for signature in ("v1,AAAA", "v1,\xe9", ""):
        assert not names["is_genuine"](secret, headers | {"webhook-signature": signature}, body, now=1614265330)
    assert not names["is_genuine"](secret, headers | {"webhook-timestamp": "now"}, body, now=1614265330)
    for name in headers:
        assert not names["is_genuine"](secret, {n: v for n, v in headers.items() if n != name}, body, now=1614265330)


def test_pull_client_of_the_manual(db):
    names = example("A client", {})
    db.sql("SELECT outbox_create_destination('search-index', 'pull', backoff => '10 minutes')")
    for number, key in enumerate("aabc"):
        db.sql("SELECT outbox_emit(NULL, %s, 'doc', %s, ordering_key => %s)", f"e{number}", json.dumps(number), key)
    connection = db.connect(autocommit=False)
    sent = []

    def publish(event):
        if event["payload"] == 0:
            raise ValueError("this one does not work")
        if event["payload"] == 3:
            raise ConnectionError("the far side is away")
        sent.append(event["payload"])

    assert names["work"](connection, "search-index", publish) == 1
    assert sent == [2]
    status = db.sql("SELECT delivered, parked_retry, parked_blocked, holders FROM outbox_status")
    assert status == [(1, 1, 1, None)]

    def publish_all(event):
        sent.append(event["payload"])

    assert names["work"](connection, "search-index", publish_all) == 1
    assert sent == [2, 3]
    assert names["work"](connection, "search-index", publish_all) == 0
