"""How much memory a process has."""
import preload


def memory(pid="self"):
    """What it has for itself, in bytes. Nothing, where a sanitizer keeps what is given back."""
    if preload.SANITIZER:
        return 0
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))
