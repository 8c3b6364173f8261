// Bytes written in hexadecimal.
#pragma once

#include <string_view>

namespace retrysafe {

// Writes hex.size() / 2 bytes to `bytes`. False, with some of them written, unless `hex` is pairs of
// hexadecimal digits and nothing else.
bool decode_hex(std::string_view hex, char *bytes);

}  // namespace retrysafe
