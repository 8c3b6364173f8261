-- What operators look at. Depth and age come from the newest batch of each shard: no view but outbox_events and
-- outbox_dead_letters reads events.

CREATE FUNCTION @extschema@.outbox_recorded_at(
  destination integer, shards integer, event_types text[], id bigint, txid xid8, event_type text, ordering_key text)
RETURNS timestamptz LANGUAGE c STABLE PARALLEL UNSAFE -- takes snapshots of its own
AS 'MODULE_PATHNAME', 'retrysafe_outbox_recorded_at';
COMMENT ON FUNCTION @extschema@.outbox_recorded_at(integer, integer, text[], bigint, xid8, text, text)
IS 'when a destination recorded an event; infinity while it has not, null when it does not want it';

CREATE VIEW @extschema@.outbox_events AS
  SELECT l.id,
         @extschema@.outbox_event_id(coalesce(l.event_key, l.idempotency_key || '~' || l.event_number), l.scope) AS event_id,
         l.scope, l.idempotency_key, l.event_key, l.event_number, l.event_type, l.ordering_key, l.payload, l.headers, l.created_at,
         l.deliver_after, l.txid,
         (SELECT nullif(pg_catalog.max(@extschema@.outbox_recorded_at(d.destination, d.shards, d.event_types, l.id, l.txid,
                                                           l.event_type, l.ordering_key)), 'infinity')
            FROM @extschema@.outbox_destinations d) AS sent_at
    FROM @extschema@.outbox_log l;
COMMENT ON VIEW @extschema@.outbox_events
IS 'the log of events; sent_at is when the last destination that wants an event recorded it';
COMMENT ON COLUMN @extschema@.outbox_events.event_number
IS 'of an event that was emitted without an event key; it is published with the event key IDEMPOTENCY_KEY~NUMBER';

CREATE VIEW @extschema@.outbox_scheduled_events AS
  SELECT @extschema@.outbox_event_id(s.event_key, s.scope) AS event_id,
         s.scope, s.idempotency_key, s.event_key, s.event_type, s.ordering_key, s.payload, s.headers, s.created_at,
         s.deliver_after
    FROM @extschema@.outbox_scheduled s;
COMMENT ON VIEW @extschema@.outbox_scheduled_events IS 'events that are not due yet';

CREATE VIEW @extschema@.outbox_dead_letters AS
  SELECT d.name AS destination, p.id,
         @extschema@.outbox_event_id(p.event_key, p.scope) AS event_id,
         p.scope, p.idempotency_key, p.event_key, p.event_type, p.ordering_key, p.payload, p.headers, p.created_at,
         p.reason, p.attempts, p.settled_at AS dead_since
    FROM @extschema@.outbox_parked p JOIN @extschema@.outbox_destinations d USING (destination)
   WHERE p.state = 'dead';
COMMENT ON VIEW @extschema@.outbox_dead_letters
IS 'events that a destination gave up on; see outbox_retry and outbox_discard';

CREATE FUNCTION @extschema@.outbox_passed_position(destination integer, shard integer, by timestamptz DEFAULT 'infinity')
RETURNS bigint LANGUAGE c VOLATILE STRICT PARALLEL UNSAFE -- takes snapshots of its own
AS 'MODULE_PATHNAME', 'retrysafe_outbox_passed_position';
COMMENT ON FUNCTION @extschema@.outbox_passed_position(integer, integer, timestamptz)
IS 'the position of the log up to which a shard had recorded everything, whenever it commits, by a time';

-- The pieces of the rings that hold rows, and what keeps those that take no more of them.
CREATE VIEW @extschema@.ring_status AS
  WITH clock AS MATERIALIZED (
    SELECT pg_catalog.clock_timestamp() AS now,
           pg_catalog.current_setting('retrysafe.outbox_retention', true)::interval AS outbox_retention
  ), behind AS MATERIALIZED ( -- up to where the log has been seen by all that a destination has recorded
    SELECT d.name, pg_catalog.min(@extschema@.outbox_passed_position(d.destination, shard)) AS position,
           pg_catalog.min(@extschema@.outbox_passed_position(d.destination, shard, clock.now - clock.outbox_retention))
             AS kept_position -- for retention counts from when it was recorded
      FROM clock
     CROSS JOIN @extschema@.outbox_destinations d
     CROSS JOIN LATERAL pg_catalog.generate_series(0, d.shards - 1) AS shard
     WHERE d.lost_at IS NULL
     GROUP BY d.name
  )
  SELECT p.ring, p.generation, (p.generation - 1) % @ring_pieces@ + 1 AS piece,
         CASE WHEN p.retired THEN 'retired'
              WHEN p.generation = pg_catalog.max(p.generation) OVER (PARTITION BY p.ring) THEN 'active'
              WHEN p.sealed_at IS NOT NULL THEN 'sealed'
              ELSE 'filled' END AS state,
         p.since, p.sealed_at, p.needed_until,
         CASE WHEN p.retired THEN ARRAY['readers']
              WHEN p.generation = pg_catalog.max(p.generation) OVER (PARTITION BY p.ring) THEN NULL
              WHEN p.sealed_at IS NULL THEN ARRAY['writers']
              WHEN p.ring = 'records' AND p.needed_until > clock.now THEN ARRAY['retention']
              WHEN p.ring = 'log' THEN
                CASE WHEN p.sealed_at > clock.now - clock.outbox_retention
                       OR EXISTS (SELECT FROM behind b WHERE b.kept_position < p.sealed_position
                                                         AND b.position >= p.sealed_position)
                  THEN ARRAY['retention'] END
                || (SELECT pg_catalog.array_agg('destination ' || b.name ORDER BY b.name)
                      FROM behind b WHERE b.position < p.sealed_position)
              WHEN p.ring = 'progress' AND p.sealed_position > 1 + coalesce(
                     (SELECT pg_catalog.min(l.since_position) FROM @extschema@.ring_pieces l WHERE l.ring = 'log'), 0)
                THEN ARRAY['log'] END AS held_by,
         size.bytes
    FROM @extschema@.ring_pieces p
   CROSS JOIN clock
   CROSS JOIN LATERAL (
           SELECT pg_catalog.sum(pg_catalog.pg_total_relation_size(c.oid))::bigint AS bytes
             FROM (VALUES ('records', '@extschema@.idem_records'::pg_catalog.regclass),
                          ('log', '@extschema@.outbox_log'), ('progress', '@extschema@.outbox_windows'),
                          ('progress', '@extschema@.outbox_batches')) AS r (ring, parent)
             JOIN pg_catalog.pg_class a ON a.oid = r.parent
             JOIN pg_catalog.pg_inherits i ON i.inhparent = r.parent
             JOIN pg_catalog.pg_class c
               ON c.oid = i.inhrelid AND c.relname = a.relname || '_' || ((p.generation - 1) % @ring_pieces@ + 1)
            WHERE r.ring = p.ring) AS size;
COMMENT ON VIEW @extschema@.ring_status
IS 'the pieces of the rings of records, events and progress, and what holds back those that could be emptied';

CREATE VIEW @extschema@.outbox_status AS
  SELECT d.name, d.kind,
         CASE WHEN suspended.reason IS NOT NULL THEN 'suspended'
              WHEN d.lost_at IS NOT NULL THEN 'lost'
              WHEN d.paused THEN 'paused'
              WHEN s.backing_off THEN 'backing off'
              WHEN s.backlog = 0 AND waiting.events = 0 THEN 'idle'
              WHEN s.backlog > 0 AND standby.awaited THEN 'awaiting standby'
              WHEN s.holders IS NULL THEN 'unclaimed'
              ELSE 'publishing' END AS state,
         suspended.reason AS suspended_reason,
         d.paused, d.lost_at,
         s.backlog,
         -- A delayed event is pending from when it is due, also while nobody moves it into the log.
         pg_catalog.clock_timestamp() - least(waiting.oldest, delayed.oldest_due, (
           SELECT greatest(l.deliver_after, l.created_at) FROM @extschema@.outbox_log l WHERE l.id > s.position ORDER BY l.id LIMIT 1
         )) AS oldest_pending_age,
         s.delivered,
         coalesce(held.bytes, 0) AS holds_back_bytes,
         waiting.retry AS parked_retry, waiting.events - waiting.retry AS parked_blocked, dead.events AS dead,
         s.failures, s.retry_at, s.last_error, s.error_at,
         s.holders,
         d.shards, d.event_types,
         @extschema@.outbox_redacted_options(d.kind, d.options) AS options,
         d.max_attempts, d.backoff, d.backoff_max, d.on_exhausted, d.batch_events, d.batch_bytes, d.lease, d.workers,
         d.run_as, d.created_at
    FROM @extschema@.outbox_destinations d
   CROSS JOIN (SELECT CASE WHEN q.is_called THEN q.last_value ELSE q.last_value - 1 END AS position
                 FROM @extschema@.outbox_log_id_seq q) AS log
   CROSS JOIN (SELECT @extschema@.outbox_suspended_reason() AS reason) AS suspended
    -- The first one by index, and then the clock: as a condition that would be asked of each delayed event.
   CROSS JOIN (SELECT (SELECT first.pending_since
                         FROM (SELECT s.deliver_after, greatest(s.deliver_after, s.created_at) AS pending_since
                                 FROM @extschema@.outbox_scheduled s ORDER BY s.deliver_after LIMIT 1) AS first
                        WHERE first.deliver_after <= pg_catalog.clock_timestamp()) AS oldest_due) AS delayed
   CROSS JOIN (SELECT @extschema@.outbox_awaits_standby() AS awaited) AS standby
   CROSS JOIN LATERAL (
           -- Where progress is missing, it is unknown.
           SELECT CASE WHEN pg_catalog.count(*) = d.shards THEN greatest(log.position - pg_catalog.min(b.position), 0) END AS backlog,
                  pg_catalog.min(b.position) AS position,
                  pg_catalog.sum(b.total_delivered)::bigint AS delivered,
                  pg_catalog.max(h.failures) AS failures,
                  pg_catalog.min(h.retry_at) FILTER (WHERE rest.is_on) AS retry_at,
                  pg_catalog.bool_and(rest.is_on) AS backing_off,
                  (pg_catalog.array_agg(h.last_error ORDER BY h.error_at DESC NULLS LAST))[1] AS last_error,
                  pg_catalog.max(h.error_at) AS error_at,
                  pg_catalog.array_agg(DISTINCT h.holder) FILTER (WHERE h.lease_until > pg_catalog.clock_timestamp()) AS holders
             FROM @extschema@.outbox_shards h
             -- One that began later than now, by a clock that was set back since, is over.
            CROSS JOIN LATERAL (SELECT coalesce(h.retry_at > pg_catalog.clock_timestamp()
                                                AND h.error_at <= pg_catalog.clock_timestamp(), false) AS is_on) AS rest
            CROSS JOIN LATERAL (SELECT n.position, n.total_delivered
                                  FROM @extschema@.outbox_batches n
                                 WHERE n.destination = h.destination AND n.shard = h.shard
                                 ORDER BY n.destination DESC, n.shard DESC, n.seq DESC LIMIT 1) AS b
            WHERE h.destination = d.destination) AS s
   CROSS JOIN LATERAL (
           SELECT pg_catalog.count(*) AS events, pg_catalog.count(*) FILTER (WHERE p.state = 'retry') AS retry, pg_catalog.min(greatest(p.deliver_after, p.created_at)) AS oldest
             FROM @extschema@.outbox_parked p
            WHERE p.destination = d.destination AND p.state IN ('retry', 'blocked')) AS waiting
   CROSS JOIN LATERAL (
           SELECT pg_catalog.count(*) AS events FROM @extschema@.outbox_parked p
            WHERE p.destination = d.destination AND p.state = 'dead') AS dead
    -- Once, not for each destination: the planner would think the view dear, and compile it for seconds.
    LEFT JOIN (SELECT holder, pg_catalog.sum(r.bytes)::bigint AS bytes
                 FROM @extschema@.ring_status r, pg_catalog.unnest(r.held_by) AS holder
                GROUP BY holder) AS held ON held.holder = 'destination ' || d.name;
COMMENT ON VIEW @extschema@.outbox_status
IS 'one row for each destination: what it does, how far it is behind, what failed';
COMMENT ON COLUMN @extschema@.outbox_status.holds_back_bytes
IS 'size of the pieces of the log that take no more events and cannot be emptied because of this destination';
COMMENT ON COLUMN @extschema@.outbox_status.backlog
IS 'upper bound of the events that are not recorded yet: positions behind, whether or not the destination wants them';

CREATE VIEW @extschema@.outbox_kind_options AS
  SELECT k.kind, k.library, o.*
    FROM (SELECT b.kind, b.library FROM @extschema@.outbox_built_in_kinds() AS b
          UNION ALL
          SELECT r.kind, r.library FROM @extschema@.outbox_kinds r) AS k (kind, library)
    LEFT JOIN LATERAL @extschema@.outbox_options_of_kind(k.kind) AS o ON true;
COMMENT ON VIEW @extschema@.outbox_kind_options
IS 'the kinds of destinations and the options that each takes; defaults of durations are in milliseconds';
