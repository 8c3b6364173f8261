"""Records of TLS 1.3, written by hand: what no TLS library sends."""
import ctypes
import hmac
import ssl
import struct

crypto = ctypes.CDLL("libcrypto.so.3")
crypto.EVP_CIPHER_CTX_new.restype = crypto.EVP_aes_256_gcm.restype = ctypes.c_void_p
TAG_SIZE, GET_TAG = 16, 0x10

HANDSHAKE = b"\x16"
# Lifetime, age, nonce, ticket, extensions.
NEW_SESSION_TICKET = b"\x04\0\0\x0f" + b"\0\0\x1c\x20" + b"\0\0\0\0" + b"\x01\0" + b"\0\x01x" + b"\0\0"


class Tls:
    """The server's side of a connection: OpenSSL's, and from flood() on ours. Reads and sends like a socket."""

    def __init__(self, connection, certificate, key, key_log):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
        context.keylog_filename = key_log
        self.raw = connection.dup()
        self.connection = context.wrap_socket(connection, server_side=True)
        assert self.connection.cipher()[0] == "TLS_AES_256_GCM_SHA384"
        with open(key_log, encoding="ascii") as file:
            self.secret = next(bytes.fromhex(line.split()[2]) for line in reversed(file.readlines())
                               if line.startswith("SERVER_TRAFFIC_SECRET_0"))
        self.sent = 0  # records

    def recv(self, size):
        return self.connection.recv(size)

    def sendall(self, data):
        self.connection.sendall(data)
        self.sent += 1

    def records(self, content_type, content):
        """Without an end."""
        cipher = ctypes.c_void_p(crypto.EVP_CIPHER_CTX_new())
        vector = int.from_bytes(self._expand(b"iv", 12), "big")
        assert crypto.EVP_EncryptInit_ex(cipher, ctypes.c_void_p(crypto.EVP_aes_256_gcm()), None, self._expand(b"key", 32), None)
        content += content_type
        head = b"\x17\x03\x03" + struct.pack("!H", len(content) + TAG_SIZE)
        body, tag, size = ctypes.create_string_buffer(len(content)), ctypes.create_string_buffer(TAG_SIZE), ctypes.c_int()
        while True:
            crypto.EVP_EncryptInit_ex(cipher, None, None, None, (vector ^ self.sent).to_bytes(12, "big"))
            crypto.EVP_EncryptUpdate(cipher, None, ctypes.byref(size), head, len(head))
            crypto.EVP_EncryptUpdate(cipher, body, ctypes.byref(size), content, len(content))
            crypto.EVP_EncryptFinal_ex(cipher, tag, ctypes.byref(size))
            crypto.EVP_CIPHER_CTX_ctrl(cipher, GET_TAG, TAG_SIZE, tag)
            self.sent += 1
            yield head + body.raw + tag.raw

    def _expand(self, label, size):
        """HKDF-Expand-Label."""
        label = b"tls13 " + label
        return hmac.digest(self.secret, struct.pack("!HB", size, len(label)) + label + b"\0\1", "sha384")[:size]
