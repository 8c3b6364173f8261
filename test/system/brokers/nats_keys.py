"""Keys of NATS and tokens signed with them, as nsc makes them: Ed25519 by openssl, names in base32."""
import base64
import json
import secrets
import subprocess
import time

OPERATOR, ACCOUNT, USER = 14 << 3, 0, 20 << 3  # "O", "A" and "U" as the first letter in base32
SEED = 18 << 3
NO_LIMIT = dict.fromkeys(("subs", "data", "payload"), -1)


def checksum(data):
    """CRC-16/XMODEM."""
    crc = 0
    for byte in data:
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1 ^ (0x1021 if crc & 0x8000 else 0)) & 0xffff
    return crc.to_bytes(2, "little")


def base32(data):
    return base64.b32encode(data + checksum(data)).decode().rstrip("=")


def base64url(data):
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


class Key:
    def __init__(self, folder, kind):
        raw = secrets.token_bytes(32)
        self._file = folder / f"{secrets.token_hex(8)}.der"
        self._file.write_bytes(bytes.fromhex("302e020100300506032b657004220420") + raw)  # PKCS #8
        public = self._openssl("pkey", "-inform", "DER", "-in", self._file, "-pubout", "-outform", "DER")[-32:]
        self.public = base32(bytes([kind]) + public)
        self.seed = base32(bytes([SEED | kind >> 5, (kind & 31) << 3]) + raw)

    @staticmethod
    def _openssl(*arguments):
        return subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True).stdout

    def token(self, subject, kind, **claims):
        """What this key says about `subject`."""
        claims = {"jti": secrets.token_hex(16), "iat": int(time.time()), "iss": self.public, "name": "test",
                  "sub": subject.public, "nats": {"type": kind, "version": 2} | claims}
        signed = ".".join(base64url(json.dumps(part).encode()) for part in ({"typ": "JWT", "alg": "ed25519-nkey"}, claims))
        text = self._file.with_suffix(".txt")
        text.write_text(signed)
        signature = self._openssl("pkeyutl", "-sign", "-rawin", "-keyform", "DER", "-inkey", self._file, "-in", text)
        return f"{signed}.{base64url(signature)}"


class Operator:
    """One account, and the settings of a server that believes this operator."""

    def __init__(self, folder):
        self._folder, key, self._account = folder, Key(folder, OPERATOR), Key(folder, ACCOUNT)
        unlimited = NO_LIMIT | dict.fromkeys(("imports", "exports", "conn", "leaf"), -1) | {"wildcards": True}
        account = key.token(self._account, "account", limits=unlimited, default_permissions={"pub": {}, "sub": {}})
        self.settings = (f"operator: {key.token(key, 'operator')}\nresolver: MEMORY\n"
                         f"resolver_preload: {{ {self._account.public}: {account} }}")

    def credentials(self):
        """A file of a new user."""
        user = Key(self._folder, USER)
        token = self._account.token(user, "user", pub={}, sub={}, **NO_LIMIT)
        return (f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
                "************************* IMPORTANT *************************\n"
                "NKEY Seed printed below can be used to sign and prove identity.\n\n"
                f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n")
