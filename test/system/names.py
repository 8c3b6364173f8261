"""Names that resolve as a test says, in a program or a server of its own (preload/names.c)."""
import contextlib
import os
import pathlib
import shutil
import tempfile
from unittest import mock

import preload
from conftest import cluster


class Names:
    def __init__(self, folder):
        self.folder = folder

    def say(self, name, answer="127.0.0.1"):
        """`answer`: an address, "none" or "hang"."""
        new = self.folder / "new"
        new.write_text(answer)
        new.rename(self.folder / name)


@contextlib.contextmanager
def names():
    """The names, and the environment of a program that resolves them."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="retrysafe-names-", dir="/tmp"))
    folder.chmod(0o755)
    library = preload.build("names", folder)
    try:
        yield Names(folder), {"LD_PRELOAD": str(library), "RETRYSAFE_TEST_NAMES": str(folder)}
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def cluster_with_names(*settings):
    with contextlib.ExitStack() as stack:
        known, environment = stack.enter_context(names())
        with mock.patch.dict(os.environ, environment):
            server = stack.enter_context(cluster(*settings))
        yield server, known
