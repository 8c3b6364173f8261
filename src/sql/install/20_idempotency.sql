-- Idempotent writes, and the inbox of consumers.

-- Beginning a key. The digest of the request comes as bytes, or as text: then an untyped literal means text.
CREATE FUNCTION @extschema@.idem_begin(
  key text, request_hash bytea, scope text DEFAULT '', ttl interval DEFAULT NULL, also_accept bytea[] DEFAULT NULL,
  OUT outcome text, OUT response jsonb, OUT status text)
LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'retrysafe_idem_begin';
COMMENT ON FUNCTION @extschema@.idem_begin(text, bytea, text, interval, bytea[]) IS
  'Begins a request: new (do the work, then idem_complete), replay (here is the saved answer) or conflict; waits for a concurrent owner.';

CREATE FUNCTION @extschema@.idem_begin(
  key text, request_hash text, scope text DEFAULT '', ttl interval DEFAULT NULL, also_accept text[] DEFAULT NULL,
  OUT outcome text, OUT response jsonb, OUT status text)
LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'retrysafe_idem_begin_text';
COMMENT ON FUNCTION @extschema@.idem_begin(text, text, text, interval, text[]) IS
  'The same with the digest as text: its UTF-8 bytes, or after \x bytes in hexadecimal.';

CREATE FUNCTION @extschema@.idem_try_begin(
  key text, request_hash bytea, scope text DEFAULT '', ttl interval DEFAULT NULL, also_accept bytea[] DEFAULT NULL,
  OUT outcome text, OUT response jsonb, OUT status text)
LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'retrysafe_idem_try_begin';
COMMENT ON FUNCTION @extschema@.idem_try_begin(text, bytea, text, interval, bytea[]) IS
  'Like idem_begin, but never waits: in_progress when another transaction owns the key.';

CREATE FUNCTION @extschema@.idem_try_begin(
  key text, request_hash text, scope text DEFAULT '', ttl interval DEFAULT NULL, also_accept text[] DEFAULT NULL,
  OUT outcome text, OUT response jsonb, OUT status text)
LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'retrysafe_idem_try_begin_text';
COMMENT ON FUNCTION @extschema@.idem_try_begin(text, text, text, interval, text[]) IS
  'Like idem_begin, but never waits; the digest as text.';

CREATE FUNCTION @extschema@.idem_complete(
  key text, response jsonb DEFAULT NULL, scope text DEFAULT '', status text DEFAULT 'completed')
RETURNS void LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'retrysafe_idem_complete';
COMMENT ON FUNCTION @extschema@.idem_complete(text, jsonb, text, text) IS
  'Saves the answer of a key that this transaction began; status failed saves a failure that every retry sees again.';

CREATE FUNCTION @extschema@.idem_run(key text, request jsonb, handler regprocedure, scope text DEFAULT '')
RETURNS jsonb LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'retrysafe_idem_run';
COMMENT ON FUNCTION @extschema@.idem_run(text, jsonb, regprocedure, text) IS
  'Answers a request: calls handler(request) and saves its result the first time, returns the saved one afterwards.';

-- No overload: an untyped literal would resolve to text, and its white space would count.
CREATE FUNCTION @extschema@.idem_hash(request jsonb)
RETURNS bytea LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'retrysafe_idem_hash';
COMMENT ON FUNCTION @extschema@.idem_hash(jsonb) IS
  'SHA-256 of a request, whatever the order of its keys: the same as sha256(convert_to(request::text, ''UTF8'')).';

-- Only one of the two has a default digest, so that idem_peek('key') is not ambiguous.
CREATE FUNCTION @extschema@.idem_peek(
  key text, request_hash bytea DEFAULT NULL, scope text DEFAULT '',
  OUT outcome text, OUT response jsonb, OUT status text)
LANGUAGE c VOLATILE PARALLEL RESTRICTED AS 'MODULE_PATHNAME', 'retrysafe_idem_peek';
COMMENT ON FUNCTION @extschema@.idem_peek(text, bytea, text) IS
  'Looks a key up without owning it: replay, conflict, in_progress or unknown.';

CREATE FUNCTION @extschema@.idem_peek(
  key text, request_hash text, scope text DEFAULT '', OUT outcome text, OUT response jsonb, OUT status text)
LANGUAGE c VOLATILE PARALLEL RESTRICTED AS 'MODULE_PATHNAME', 'retrysafe_idem_peek_text';
COMMENT ON FUNCTION @extschema@.idem_peek(text, text, text) IS
  'Looks a key up without owning it; the digest as text.';

CREATE FUNCTION @extschema@.idem_forget(key text, scope text DEFAULT '')
RETURNS boolean LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'retrysafe_idem_forget';
COMMENT ON FUNCTION @extschema@.idem_forget(text, text) IS
  'Removes the saved answer of a key, which then counts as new; false when there is none.';

CREATE FUNCTION @extschema@.idem_cleanup(max_rows integer DEFAULT 10000)
RETURNS bigint LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'retrysafe_idem_cleanup';
COMMENT ON FUNCTION @extschema@.idem_cleanup(integer) IS
  'Removes up to max_rows expired answers and as many expired inbox messages; returns how many.';

CREATE FUNCTION @extschema@.inbox_accept(consumer text, event_id text)
RETURNS boolean LANGUAGE c VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'retrysafe_inbox_accept';
COMMENT ON FUNCTION @extschema@.inbox_accept(text, text) IS
  'True the first time a consumer has this event, and false for every later copy.';

-- A set and not an array: as an array it would be called again for each row it is compared with.
CREATE FUNCTION @extschema@.inbox_accept(consumer text, event_ids text[])
RETURNS SETOF text LANGUAGE c VOLATILE ROWS 100 PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'retrysafe_inbox_accept_all';
COMMENT ON FUNCTION @extschema@.inbox_accept(text, text[]) IS
  'The ids among event_ids that this consumer has not had before, each once.';

-- One row per key: the live one, or else the last, until it is removed.
CREATE VIEW @extschema@.idempotency_records AS
SELECT DISTINCT ON (key, scope)
       key, scope, request_hash, status, response_json, created_at, completed_at, expires_at, txid
  FROM @extschema@.idem_records
 ORDER BY key, scope, expires_at DESC;
COMMENT ON VIEW @extschema@.idempotency_records IS 'The saved answers; one that has expired counts as absent.';

-- Counts are estimates, or stop at 10000: an operator's look costs the same however many records there are.
-- Locks with this objsubid are the claims on keys.
CREATE VIEW @extschema@.idem_status AS
WITH clock AS MATERIALIZED (
  SELECT pg_catalog.clock_timestamp() AS now,
         pg_catalog.current_setting('retrysafe.inbox_retention', true)::interval AS inbox_retention
), claims AS MATERIALIZED (
  SELECT pg_catalog.count(*) FILTER (WHERE granted) AS held, pg_catalog.count(*) FILTER (WHERE NOT granted) AS waiting
    FROM pg_catalog.pg_locks
   WHERE locktype = 'advisory' AND objsubid = 21075
     AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
), records AS MATERIALIZED (
  SELECT pg_catalog.sum(GREATEST(c.reltuples, 0))::bigint AS estimate,
         pg_catalog.sum(pg_catalog.pg_total_relation_size(c.oid))::bigint AS bytes
    FROM pg_catalog.pg_inherits i JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid
   WHERE i.inhparent = '@extschema@.idem_records'::pg_catalog.regclass
)
SELECT claims.held AS keys_in_progress,
       claims.waiting AS sessions_waiting,
       records.estimate AS records_estimate,
       records.bytes AS records_bytes,
       (SELECT pg_catalog.count(*) FROM (SELECT FROM @extschema@.idem_records_with_ttl
                                          WHERE expires_at <= clock.now LIMIT 10000) AS r) AS records_expired,
       (SELECT pg_catalog.min(expires_at) FROM @extschema@.idem_records_with_ttl) AS oldest_record_expires_at,
       (SELECT GREATEST(reltuples, 0)::bigint FROM pg_catalog.pg_class
         WHERE oid = '@extschema@.inbox_messages'::pg_catalog.regclass) AS inbox_estimate,
       pg_catalog.pg_total_relation_size('@extschema@.inbox_messages'::pg_catalog.regclass) AS inbox_bytes,
       (SELECT pg_catalog.count(*) FROM (SELECT FROM @extschema@.inbox_messages
                                          WHERE seen_at <= clock.now - clock.inbox_retention LIMIT 10000) AS m)
         AS inbox_expired,
       (SELECT pg_catalog.min(seen_at) FROM @extschema@.inbox_messages) AS oldest_inbox_message_seen_at
  FROM clock, claims, records;
COMMENT ON VIEW @extschema@.idem_status IS
  'Keys in progress, saved answers and inbox messages, and what waits for idem_cleanup row by row (counted up to 10000).';
