// What JetStream says about a published message, and what that means for its event.
#pragma once

#include <string>
#include <string_view>

namespace retrysafe::nats {

struct PublishAnswer {
  enum class Verdict {
    kStored,  // or stored before: a duplicate is as good
    kFailedRetry,
    kFailedFinal,
    // Neither this message nor any other like it can be stored now.
    kRefused,
  };

  Verdict verdict;
  std::string reason;  // empty when stored
};

// `body` is what came to the message's reply subject: a JSON object of JetStream's. Anything else was sent by
// somebody who listens on the message's subject, and says nothing about it being stored.
PublishAnswer parse_answer(std::string_view body);

}  // namespace retrysafe::nats
