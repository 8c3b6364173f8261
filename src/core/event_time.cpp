#include "core/event_time.hpp"

#include <chrono>

namespace retrysafe {

namespace {

char *put(unsigned number, int digits, char *out) {
  for (int i = digits; i > 0; number /= 10) out[--i] = static_cast<char>('0' + number % 10);
  return out + digits;
}

}  // namespace

std::size_t event_time(std::int64_t microseconds, char *out) noexcept {
  using namespace std::chrono;
  constexpr sys_days epoch = year{2000} / January / 1;
  constexpr std::chrono::microseconds first = sys_days(year{0} / January / 1) - epoch;
  constexpr std::chrono::microseconds end = sys_days(year{10000} / January / 1) - epoch;
  const std::chrono::microseconds since{microseconds};
  if (since < first || since >= end) return 0;

  const auto day = floor<days>(since);
  const year_month_day date{epoch + day};
  const hh_mm_ss time{since - day};
  char *at = put(static_cast<unsigned>(static_cast<int>(date.year())), 4, out);
  *at++ = '-';
  at = put(static_cast<unsigned>(date.month()), 2, at);
  *at++ = '-';
  at = put(static_cast<unsigned>(date.day()), 2, at);
  *at++ = 'T';
  at = put(static_cast<unsigned>(time.hours().count()), 2, at);
  *at++ = ':';
  at = put(static_cast<unsigned>(time.minutes().count()), 2, at);
  *at++ = ':';
  at = put(static_cast<unsigned>(time.seconds().count()), 2, at);
  *at++ = '.';
  at = put(static_cast<unsigned>(time.subseconds().count()), 6, at);
  *at++ = 'Z';
  return kEventTimeSize;
}

}  // namespace retrysafe
