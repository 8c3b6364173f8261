#include "core/library_path.hpp"

#include <unistd.h>

#include <cstdio>
#include <cstring>

namespace retrysafe {

namespace {

constexpr std::string_view kMacro = "$libdir";

int length(std::string_view text) {
  return static_cast<int>(text.size());
}

}  // namespace

void find_library(std::string_view library, const LibraryPath &where, LibrarySearch *search) {
  search->folders[0] = '\0';
  std::string_view rest = where.path.empty() ? kMacro : where.path;
  while (true) {
    const size_t colon = rest.find(':');
    std::string_view below = rest.substr(0, colon);
    std::string_view base;
    if (below == kMacro || below.starts_with("$libdir/")) {
      base = where.libdir;
      below.remove_prefix(kMacro.size());
    }
    char folder[PATH_MAX];
    std::snprintf(folder, sizeof folder, "%.*s%.*s", length(base), base.data(), length(below), below.data());
    const int size = std::snprintf(search->file, sizeof search->file, "%s/%.*s.so", folder, length(library),
                                   library.data());
    // Relative folders would depend on where the process happens to be.
    if (folder[0] == '/' && size < static_cast<int>(sizeof search->file)) {
      if (access(search->file, R_OK) == 0) return;
      const size_t used = std::strlen(search->folders);
      std::snprintf(search->folders + used, sizeof search->folders - used, "%s%s", used ? ":" : "", folder);
    }
    if (colon == std::string_view::npos) break;
    rest.remove_prefix(colon + 1);
  }
  search->file[0] = '\0';
}

}  // namespace retrysafe
