#include "sinks/kafka/certificate_check.hpp"

#include <openssl/x509_vfy.h>

#include <exception>

namespace retrysafe::kafka {

int CertificateCheck::note(const char *broker, int x509_error, int depth) noexcept {
  const bool accepted = x509_error == X509_V_OK;
  try {
    const std::lock_guard lock(mutex_);
    if (!accepted)
      failure_ = std::string(broker) +
                 ": the broker's certificate is not accepted: " + X509_verify_cert_error_string(x509_error);
    else if (depth == 0)
      failure_.clear();
  } catch (const std::exception &) {
    // Without memory the library's own words have to do.
  }
  return accepted ? 1 : 0;
}

std::string CertificateCheck::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

}  // namespace retrysafe::kafka
