// Takes secrets out of texts of a far side, which may repeat what it was told.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace retrysafe {

class SecretMask {
 public:
  // Very short ones are left: they would be found everywhere, and so be told.
  void add(std::string_view secret);

  // Never makes the text longer. Also where a text that was cut ends with the beginning of a secret.
  void apply(std::string *text) const;

 private:
  void add_one(std::string_view secret);

  std::vector<std::string> secrets_;  // the longest first
};

}  // namespace retrysafe
