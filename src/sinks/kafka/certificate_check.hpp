// Why a broker's certificate is not accepted.
//
// The library says no more than that it could not be verified, whether it has expired or is somebody else's.
// It leaves the verdict to OpenSSL, and so does this: its hook only writes down what that found.
#pragma once

#include <librdkafka/rdkafka.h>

#include <mutex>
#include <string>

namespace retrysafe::kafka {

class CertificateCheck {
 public:
  // For each certificate of a chain; called by threads of the library. 0: not accepted.
  int note(const char *broker, int x509_error, int depth) noexcept;

  // Of the last one that was not accepted; empty: there is none.
  std::string failure() const;

 private:
  mutable std::mutex mutex_;
  std::string failure_;
};

}  // namespace retrysafe::kafka
