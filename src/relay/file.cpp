#include "relay/file.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace retrysafe::relay {

std::optional<std::string> read_whole_file(const char *path) {
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return std::nullopt;
  std::string text;
  char part[4096];
  ssize_t count;
  while ((count = read(file, part, sizeof part)) > 0) text.append(part, static_cast<size_t>(count));
  const int error = count < 0 ? errno : 0;
  close(file);
  errno = error;
  return error == 0 ? std::optional(std::move(text)) : std::nullopt;
}

}  // namespace retrysafe::relay
