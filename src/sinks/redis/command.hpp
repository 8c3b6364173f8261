// Commands in the form that the server reads (RESP), appended to what is to be sent.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

#include "sink/abi.h"

namespace retrysafe::redis {

void append_command(std::initializer_list<std::string_view> words, std::string *out);

// XADD of one event: CloudEvents attributes are the fields, the payload is the field `data`. `source`:
// instead of the event's own, unless empty. `max_length` 0: the stream is not trimmed.
void append_xadd(const retrysafe_event &event, std::string_view stream, std::string_view source,
                 long max_length, std::string *out);

}  // namespace retrysafe::redis
