// Gets hold of connections that are still the client library's secret.
//
// The library waits without any bound for a server that goes silent in the TLS handshake, and worse for one
// that does not answer its greeting: there it spins and eats memory. It does not tell the descriptor before
// it is through with that, so it is looked for among those of the process.
#pragma once

#include <sys/socket.h>

#include <span>

namespace retrysafe::nats {

// Shuts down the sockets of this process that are connected to `peer`, but for those in `keep`.
void shut_down_sockets_to(const sockaddr_storage &peer, std::span<const int> keep);

}  // namespace retrysafe::nats
