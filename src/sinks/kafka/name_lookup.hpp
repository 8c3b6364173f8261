// Where connections may go: the library's hook for host names.
//
// The library looks up the name of every broker that it connects to, those that the cluster advertises
// included, and connects to no other address than those that it gets here. So this is where the address
// filter stands. The library's own look-up would also keep its thread for as long as the name service takes,
// and ending that thread with it; this one is left alone as soon as stop() is called.
#pragma once

#include <netdb.h>

#include <chrono>
#include <mutex>
#include <string>

#include "core/address_filter.hpp"

namespace retrysafe::kafka {

class NameLookup {
 public:
  NameLookup(const AddressFilter &addresses, std::chrono::milliseconds timeout);
  ~NameLookup();
  NameLookup(const NameLookup &) = delete;
  NameLookup &operator=(const NameLookup &) = delete;

  // The hook; called by threads of the library. With `node` null it frees the list.
  static int resolve(const char *node, const char *service, const addrinfo *hints, addrinfo **list,
                     void *self) noexcept;

  // Makes all look-ups end at once, those under way and those to come.
  void stop();

  struct Failure {
    std::string text;
    bool refused = false;  // by the filter, and so it will be next time
  };

  // Why the last name led nowhere, where the filter or the look-up itself said more than the library can;
  // else without a text.
  Failure failure() const;

 private:
  int look_up(const char *node, const char *service, addrinfo **list);
  void note(Failure failure);

  const AddressFilter addresses_;  // a producer may outlive its destination
  const std::chrono::milliseconds timeout_;
  const int stop_fd_;
  mutable std::mutex mutex_;
  Failure failure_;
};

}  // namespace retrysafe::kafka
