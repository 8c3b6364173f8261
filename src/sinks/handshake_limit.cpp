#include "sinks/handshake_limit.hpp"

#include <cstdint>

namespace retrysafe::sink {

namespace {

// Of messages and of records that carry them. Setting a connection up takes some twenty.
constexpr intptr_t kMost = 1000;

}  // namespace

void limit_handshake(int outgoing, int, int type, const void *bytes, size_t size, SSL *connection,
                     void *) noexcept {
  if (outgoing != 0 || size == 0) return;
  // With TLS 1.3 the head of a record does not tell what is in it.
  const bool is_head = type == SSL3_RT_HEADER || type == SSL3_RT_INNER_CONTENT_TYPE;
  const bool is_record = is_head && *static_cast<const unsigned char *>(bytes) == SSL3_RT_HANDSHAKE;
  if (type != SSL3_RT_HANDSHAKE && !is_record) return;
  static const int count_index = SSL_get_ex_new_index(0, nullptr, nullptr, nullptr, nullptr);
  const intptr_t count = reinterpret_cast<intptr_t>(SSL_get_ex_data(connection, count_index)) + 1;
  SSL_set_ex_data(connection, count_index, reinterpret_cast<void *>(count));
  if (count > kMost) SSL_set_shutdown(connection, SSL_get_shutdown(connection) | SSL_RECEIVED_SHUTDOWN);
}

}  // namespace retrysafe::sink
