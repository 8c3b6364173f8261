// Where libraries of sinks are looked for.
#pragma once

#include <climits>
#include <string_view>

namespace retrysafe {

// As the server's dynamic_library_path says: folders separated by colons, each may begin with $libdir.
struct LibraryPath {
  std::string_view path;    // empty: only $libdir
  std::string_view libdir;  // the server's package library directory
};

struct LibrarySearch {
  char file[PATH_MAX];     // empty: there is none
  char folders[PATH_MAX];  // that were looked into until then, separated by colons
};

// Neither allocates nor throws, so that server code may ask. `library`: no folder, no suffix.
void find_library(std::string_view library, const LibraryPath &where, LibrarySearch *search);

}  // namespace retrysafe
