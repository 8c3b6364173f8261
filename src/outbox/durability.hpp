// When what a window sees may leave the server: when it is durable, on the disk here and, with
// retrysafe.publish_after = synchronous_standby, with the synchronous standbys.
//
// Writers wait for these by themselves, but not always: a commit can be asynchronous or local, its wait can
// be cancelled by a shutdown or by hand, and what waited when the server crashed is visible when it is up
// again. So the reader asks. It notes where WAL ends when it has found something in a window, and reads that
// window again when the standbys have it. The window stays the same until then: a new one would always be
// ahead of them. What did not get through comes in a new one.
//
// All of it is memory of this process. Nobody waits inside a transaction, but for outbox_fetch, shortly.
#pragma once

#include "core/snapshot.hpp"
#include "outbox/engine.hpp"
#include "outbox/shard.hpp"
#include "outbox/window.hpp"

#include "pg/server.hpp"

namespace retrysafe::outbox {

// Makes everything durable that a snapshot taken until now sees (also commits under synchronous_commit =
// off). Returns where WAL ends that holds it.
XLogRecPtr flush_wal();

// The window number `window_no` of a shard, if one was taken that comes after `done` and nothing of it was
// published. Null otherwise.
const StoredSnapshot *window_kept_back(const ShardKey &key, int64 window_no, const StoredSnapshot &done);

// Whether this very window waits for the standbys.
bool is_kept_for_standby(const ShardKey &key, const OpenWindow &open);

// Whether events of the window may be published. False: not before the standbys have them. The window is
// kept.
bool may_publish(const ShardKey &key, const OpenWindow &open);

// Waits so long for the standbys on behalf of the windows of a destination, or of all (0), if any of them are
// kept. True: the standbys have one of these now.
bool let_standby_catch_up(int32 destination, long timeout_ms);

// Where WAL ends, if there are standbys that events wait for and that do not have all of it; else invalid.
XLogRecPtr position_to_catch_up();
bool standbys_have(XLogRecPtr position);

}  // namespace retrysafe::outbox
