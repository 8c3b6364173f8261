// A TLS server may send messages of its handshake for as long as a connection lasts: tickets, new keys.
// OpenSSL reads on through them and comes back when something else is there, or nothing. With a far side that
// sends them faster than they are worked through, which is easy, it would stay for ever. Nobody needs many of
// them.
#pragma once

#include <openssl/ssl.h>

#include <cstddef>

namespace retrysafe::sink {

// For SSL_set_msg_callback and SSL_CTX_set_msg_callback. With too many of them the connection counts as
// closed by the far side.
void limit_handshake(int outgoing, int version, int type, const void *bytes, size_t size, SSL *connection,
                     void *unused) noexcept;

}  // namespace retrysafe::sink
