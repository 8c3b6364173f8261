#include "core/batch_handle.hpp"

#include <charconv>
#include <cstring>

namespace retrysafe {

namespace {

struct Writer {
  char *at;
  char *end;

  template <class Number>
  void number(Number n) {
    at = std::to_chars(at, end, n).ptr;
  }
  void separator(char c) { *at++ = c; }
};

struct Reader {
  std::string_view rest;

  // Decimal without sign, leading zeros or anything else that would make two texts name one batch.
  template <class Number>
  bool number(Number *out) {
    if (rest.empty() || rest[0] < '0' || rest[0] > '9') return false;
    if (rest[0] == '0' && rest.size() > 1 && rest[1] >= '0' && rest[1] <= '9') return false;
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), *out);
    if (error != std::errc{}) return false;
    rest.remove_prefix(static_cast<std::size_t>(end - rest.data()));
    return true;
  }
  bool separator(char c) {
    if (rest.empty() || rest[0] != c) return false;
    rest.remove_prefix(1);
    return true;
  }
};

}  // namespace

int format_handle(const BatchHandle &handle, char *out) {
  Writer w{out, out + BatchHandle::kMaxLength};
  w.number(handle.destination);
  w.separator('.');
  w.number(handle.shard);
  w.separator('.');
  w.number(handle.token);
  w.separator('.');
  w.number(handle.window_no);
  w.separator('.');
  w.number(handle.from);
  w.separator('.');
  w.number(handle.to);
  w.separator('.');
  w.number(handle.check);
  if (handle.transaction != 0) {
    w.separator(':');
    w.number(handle.transaction);
  }
  for (int i = 0; i < handle.parked_count; ++i) {
    w.separator(i == 0 ? '.' : '-');
    w.number(handle.parked[i].id);
    w.separator('~');
    w.number(handle.parked[i].turn);
  }
  *w.at = '\0';
  return static_cast<int>(w.at - out);
}

bool parse_handle(std::string_view text, BatchHandle *handle) {
  Reader r{text};
  if (!(r.number(&handle->destination) && r.separator('.') && r.number(&handle->shard) && r.separator('.') &&
        r.number(&handle->token) && r.separator('.') && r.number(&handle->window_no) && r.separator('.') &&
        r.number(&handle->from) && r.separator('.') && r.number(&handle->to) && r.separator('.') &&
        r.number(&handle->check)))
    return false;
  handle->transaction = 0;
  if (r.separator(':') && !(r.number(&handle->transaction) && handle->transaction != 0)) return false;
  handle->parked_count = 0;
  while (!r.rest.empty()) {
    if (handle->parked_count == BatchHandle::kMaxParked) return false;
    ParkedItem &item = handle->parked[handle->parked_count];
    if (!(r.separator(handle->parked_count == 0 ? '.' : '-') && r.number(&item.id) && r.separator('~') &&
          r.number(&item.turn)))
      return false;
    ++handle->parked_count;
  }
  return handle->from <= handle->to;
}

std::uint32_t first_number(const Uuid &id) {
  std::uint32_t number;
  std::memcpy(&number, id.data(), sizeof number);
  return number;
}

std::uint32_t first_token(const Uuid &log, std::uint32_t timeline) {
  return add_to_check(first_number(log), timeline);
}

std::uint32_t add_to_check(std::uint32_t check, std::int64_t number) {
  std::uint64_t h = static_cast<std::uint64_t>(number) + check + 0x9e3779b97f4a7c15ULL;
  h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9ULL;
  h = (h ^ (h >> 27)) * 0x94d049bb133111ebULL;
  return static_cast<std::uint32_t>(h ^ (h >> 31));
}

}  // namespace retrysafe
