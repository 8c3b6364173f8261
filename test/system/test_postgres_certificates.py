"""The destination kind "postgres" with certificates of ours, which a server of its own demands."""
import shutil
import subprocess
import sys

import pytest

from conftest import TOP, cluster, eventually, make_database
from far_database import INBOX, create, sinks, statuses  # noqa: F401 (the fixture sinks)

sys.path.insert(0, str(TOP / "test/sinks"))
from sink import DELIVERED, UNREACHABLE, OpenError  # noqa: E402


@pytest.fixture(scope="module")
def guarded():
    """A server that demands a certificate of its authority; its role courier needs nothing else, `asked` a password too."""
    with cluster() as own:
        folder = own.directory / "tls"
        folder.mkdir(mode=0o755)

        def openssl(*words):
            subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

        key = "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"
        openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=ca")
        openssl("req", "-x509", *key, "-keyout", "nobody.key", "-out", "nobody.pem", "-days", "2", "-subj", "/CN=courier")
        (folder / "extension").write_text("subjectAltName=IP:127.0.0.1")
        for name in "server", "courier":
            openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
            openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2",
                    "-out", f"{name}.pem", "-extfile", "extension")
        openssl("pkey", "-in", "courier.key", "-aes256", "-passout", "pass:hunter2", "-out", "locked.key")
        for path in folder.glob("*.key"):
            path.chmod(0o600)
            shutil.chown(path, (own.directory / "data").owner())
        far = make_database(own)
        far.sql(INBOX)
        for role in "courier", "asked":
            far.sql(f"CREATE ROLE {role} LOGIN PASSWORD 'right'")
            far.sql(f"GRANT INSERT ON public.retrysafe_inbox TO {role}")
        hba = own.directory / "data/pg_hba.conf"
        hba.write_text("hostssl all courier 127.0.0.1/32 cert\n"
                       "hostssl all asked 127.0.0.1/32 scram-sha-256 clientcert=verify-ca\n"
                       "host all courier,asked 127.0.0.1/32 reject\n" + hba.read_text())
        for setting, name in ("ssl_ca_file", "ca.pem"), ("ssl_cert_file", "server.pem"), ("ssl_key_file", "server.key"):
            own.set(setting, folder / name)
        own.set("ssl", "on")
        eventually(lambda: far.value("SHOW ssl") == "on")
        yield far, folder


def certificate(folder, name="courier", key=None):
    return {"sslmode": "verify-full", "ca_file": folder / "ca.pem", "cert_file": folder / f"{name}.pem",
            "key_file": folder / f"{key or name}.key"}


@pytest.mark.parametrize("change", [{}, {"sslmode": "prefer", "ca_file": None}, {"key": "locked", "key_password": "hunter2"}])
def test_a_certificate_is_shown(guarded, sinks, change):
    far, folder = guarded
    options = certificate(folder, key=change.pop("key", None)) | change
    assert statuses(sinks(far, user="courier", **options).deliver("a")) == {"a": DELIVERED}


@pytest.mark.parametrize("change, reason", [
    ({"cert_file": None, "key_file": None}, "certificate"),
    ({"name": "nobody"}, ""),
    ({"key": "nobody"}, "mismatch"),
    ({"key": "locked"}, "locked.key"),
    ({"key": "locked", "key_password": "hunter3"}, "locked.key"),
])
def test_a_certificate_that_is_not_good_enough(guarded, sinks, change, reason):
    far, folder = guarded
    options = certificate(folder, **{part: change.pop(part) for part in ("name", "key") if part in change}) | change
    outcomes = sinks(far, user="courier", **options).deliver("a")
    assert statuses(outcomes) == {"a": UNREACHABLE}
    assert reason in outcomes["a"].reason and "hunter" not in outcomes["a"].reason


def test_a_certificate_does_not_replace_the_password(guarded, sinks):
    far, folder = guarded
    asked = {"require_password": "true", "password": "right", **certificate(folder)}
    assert statuses(sinks(far, user="asked", **asked).deliver("b")) == {"b": DELIVERED}
    outcomes = sinks(far, user="courier", **asked).deliver("c")
    assert statuses(outcomes) == {"c": UNREACHABLE}
    with pytest.raises(OpenError, match='option "password" is missing'):
        sinks(far, user="courier", require_password="true", **certificate(folder))


@pytest.mark.parametrize("option", ["ca_file", "cert_file", "key_file"])
def test_a_file_that_has_gone_is_not_passed_over(guarded, sinks, tmp_path, option):
    """libpq would not verify the server, or show no certificate."""
    far, folder = guarded
    options = certificate(folder) | {"sslmode": "require"}
    moved = shutil.copy2(options[option], tmp_path / option)
    sink = sinks(far, user="courier", **options | {option: moved})
    assert statuses(sink.deliver("d")) == {"d": DELIVERED}
    (tmp_path / option).unlink()
    end_connections(far, "courier")
    outcomes = sink.deliver("e")
    assert statuses(outcomes) == {"e": UNREACHABLE}
    assert outcomes["e"].reason == f'the file of option "{option}" cannot be read: No such file or directory'


def end_connections(database, role):
    assert database.value("SELECT count(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity WHERE usename = %s", role) > 0


def test_the_worker_shows_a_certificate(server, db, guarded):
    far, folder = guarded
    server.set("retrysafe.allowed_secret_directory", folder)
    try:
        create(db, far, user="courier", sslmode="verify-full", ca_file="ca.pem", cert_file="courier.pem",
               key_file="locked.key", key_password="hunter2")
        db.sql("SELECT outbox_emit(NULL, 'e1', 't', '{}')")
        eventually(lambda: far.value("SELECT count(*) FROM public.retrysafe_inbox WHERE event_key = 'e1'") == 1)
        assert "hunter2" not in str(db.sql("SELECT * FROM outbox_status"))
    finally:
        server.set("retrysafe.allowed_secret_directory", None)
