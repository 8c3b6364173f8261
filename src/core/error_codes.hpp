// Every error that retrysafe raises by itself, with the SQLSTATE that is part of its interface.
//
// docs/reference.md lists them for users; a test compares the two lists. Errors that the server has a good
// code for (40001, 42501, 55P03 …) keep it and are not listed here.
#pragma once

namespace retrysafe {

struct ErrorCode {
  char sqlstate[6];
};

// Idempotent writes
inline constexpr ErrorCode kConflict{"RS001"};             // idem_run: the key was used for another request
inline constexpr ErrorCode kInvalidKey{"RS002"};           // key null, empty or too long
inline constexpr ErrorCode kInvalidRequestHash{"RS003"};   // digest null, empty, too long, bad hex
inline constexpr ErrorCode kResponseTooLarge{"RS004"};     // over retrysafe.max_response_bytes
inline constexpr ErrorCode kKeyNotOwned{"RS005"};          // complete or emit without idem_begin
inline constexpr ErrorCode kKeyAlreadyBegun{"RS006"};      // begun twice before complete
inline constexpr ErrorCode kClaimLost{"RS007"};            // complete or emit after the claim was rolled back
inline constexpr ErrorCode kKeyNotCompleted{"RS008"};      // commit or prepare without complete
inline constexpr ErrorCode kAlreadyCompleted{"RS009"};     // completed before with another answer
inline constexpr ErrorCode kReadOnly{"RS010"};             // unknown key in a read-only session
inline constexpr ErrorCode kInvalidScope{"RS011"};         // scope null or too long
inline constexpr ErrorCode kInvalidTtl{"RS012"};           // ttl not positive or not finite
inline constexpr ErrorCode kInvalidStatus{"RS013"};        // status other than completed or failed
inline constexpr ErrorCode kInvalidHandler{"RS014"};       // idem_run: not a function(jsonb) returning jsonb
inline constexpr ErrorCode kLostClaimAtCommit{"RS015"};    // retrysafe.on_lost_claim = error
inline constexpr ErrorCode kInvalidInboxMessage{"RS016"};  // consumer or event id null, empty or too long

// Outbox
inline constexpr ErrorCode kInvalidEventKey{"RS101"};      // event key null, empty or too long
inline constexpr ErrorCode kEventDiffers{"RS102"};         // the event key names an event with other content
inline constexpr ErrorCode kPayloadTooLarge{"RS103"};      // over retrysafe.max_payload_bytes
inline constexpr ErrorCode kInvalidEventType{"RS104"};     // type null, empty, too long, control characters
inline constexpr ErrorCode kInvalidHeaders{"RS105"};       // headers not an object of strings, or bad names
inline constexpr ErrorCode kInvalidOrderingKey{"RS106"};   // ordering key empty or too long
inline constexpr ErrorCode kInvalidDeliverAfter{"RS107"};  // delivery time not finite
inline constexpr ErrorCode kPositionsOutOfOrder{"RS108"};  // the log's sequence was altered
inline constexpr ErrorCode kRowRefused{"RS109"};           // a trigger or rule stands before our table
inline constexpr ErrorCode kPayloadTooDeep{"RS110"};       // arrays and objects within one another

// Destinations and the engine
inline constexpr ErrorCode kUnknownDestination{"RS201"};
inline constexpr ErrorCode kDestinationExists{"RS202"};
inline constexpr ErrorCode kInvalidOption{"RS203"};  // of the kind: unknown, ill-typed, out of range
inline constexpr ErrorCode kUnknownKind{"RS204"};
inline constexpr ErrorCode kInvalidStart{"RS205"};    // start position
inline constexpr ErrorCode kEventsPending{"RS206"};   // the shard count changes only while nothing is pending
inline constexpr ErrorCode kWrongIsolation{"RS207"};  // fetch, ack and nack need READ COMMITTED
inline constexpr ErrorCode kFetchAfterEmit{"RS208"};  // fetch in a transaction that emitted
inline constexpr ErrorCode kInvalidBatch{"RS209"};    // not a batch that outbox_fetch gave out
inline constexpr ErrorCode kStaleBatch{"RS210"};      // the lease ended, or another holder has the shard
inline constexpr ErrorCode kEventNotInBatch{"RS211"};
inline constexpr ErrorCode kCursorMissing{"RS212"};        // progress rows are gone: never "from zero"
inline constexpr ErrorCode kPublishingSuspended{"RS213"};  // restored or cloned: consent is due
inline constexpr ErrorCode kInvalidParameter{"RS214"};     // a limit, lease, policy … out of range
inline constexpr ErrorCode kConsentRefused{"RS215"};
inline constexpr ErrorCode kInvalidFunction{"RS216"};  // kind function: missing, wrong signature
inline constexpr ErrorCode kNotFetchable{"RS217"};     // kind function is worked inside the database only
inline constexpr ErrorCode kDestinationLost{"RS218"};  // it held back more than retrysafe.max_retained_bytes
inline constexpr ErrorCode kTransactionGoesOn{"RS219"};  // rings are not turned then: a warning
inline constexpr ErrorCode kMissingLibrary{"RS220"};     // of a kind that is registered: a warning

// Installation and processes
inline constexpr ErrorCode kNotInstalled{"RS301"};  // the extension is missing or of another version
inline constexpr ErrorCode kNoWorkerSlot{"RS303"};  // max_worker_processes exhausted

}  // namespace retrysafe
