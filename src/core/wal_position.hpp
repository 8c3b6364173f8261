// Where written-ahead log really ends.
#pragma once

#include <cstdint>

namespace retrysafe {

struct WalLayout {
  std::uint64_t page_size, segment_size;
  std::uint64_t page_header, segment_header;  // a segment's first page has the longer header
};

// The server gives the insert position as the place of the *next* byte. After a record that filled its page
// this is behind the header of the next page, which nobody has written yet: a flush up to there can only fail
// ("flush request is not satisfied"). The last byte that exists is before that header.
constexpr std::uint64_t end_of_wal(std::uint64_t insert_position, const WalLayout &layout) {
  if (insert_position % layout.segment_size == layout.segment_header)
    return insert_position - layout.segment_header;
  if (insert_position % layout.page_size == layout.page_header &&
      insert_position % layout.segment_size > layout.page_size)
    return insert_position - layout.page_header;
  return insert_position;
}

}  // namespace retrysafe
